"""The pipeline of all operations: describe and check arrays, plan, choose a kernel, call. Independent of any operation.

array    descriptions of arrays, and their checks        spec     what selects a kernel
words    checks of flags, numbers and names              op       Op, and the Plan of a call
lengths  lengths and positions from the host             prepare  from a Plan to something that launches
cache    the cache of plans
"""

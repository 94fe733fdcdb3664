"""One pipeline for every operation: arrays described and checked, a plan, its kernel, a call; nothing of one operation.

array    descriptions of arrays, and their checks        spec     what selects a kernel
words    checks of flags, numbers and names              op       Op, and the Plan of a call
lengths  lengths and positions from the host             prepare  from a Plan to something that launches
cache    plans by what they depend on
"""

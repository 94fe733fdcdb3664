"""A paged key/value cache: which page holds which tokens of which sequence.

pages    the allocator: free pages, reference counts, sequences; integers alone
tables   page table, lengths and offsets of a batch, in NumPy on the host and as arrays of the framework
storage  what a framework keeps: pools, copies of pages, uploads
"""

"""A paged key/value cache: which page holds which tokens of which sequence, and the arrays behind the pages.

pages    the allocator: free pages, reference counts, sequences; integers alone
tables   page table, lengths and offsets of a batch, in NumPy on the host and as arrays of the framework
storage  what a framework keeps: pools, copies of pages, uploads; one file of arrays_* for each framework
step     one batch of new tokens: writes them, and gives what attention takes
cache    qflash.KVCache, which holds them together under one lock
"""

from qflash.kvcache.cache import KVCache
from qflash.kvcache.step import Step

__all__ = ["KVCache", "Step"]

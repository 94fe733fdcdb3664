"""A paged key/value cache: which page holds which tokens of which sequence, and the arrays of the pages.

pages    the allocator: free pages, reference counts, sequences; only integers
tables   page table, lengths and offsets of a batch, in NumPy on the host and as arrays of the framework
storage  interface to a framework: pools, copies of pages, uploads; one file arrays_* for each framework
step     one batch of new tokens: writes them, and returns what attention takes
cache    qflash.KVCache, which combines them under one lock
"""

from qflash.kvcache.cache import KVCache
from qflash.kvcache.step import Step

__all__ = ["KVCache", "Step"]

"""Compiles CUDA sources on first use and caches the result: compilers, caches and dlopen, independent of attention.

toolchain  finds nvcc                 cache     entries on disk, safe under crashes, races and other users
runtime    one libcudart for all      entry     sizes and digests of an entry's files
compiler   one unit to one .so        trust     whose files may be opened
load       dlopen of a checked .so    layout    names in the cache: which files are its own
prebuild   many units in parallel     prebuilt  chooses an entry where there is no compiler
                                      lock      which process may build or remove an entry
                                      contents  what a cache contains, and clearing it
"""

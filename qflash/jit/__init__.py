"""Compile CUDA sources on first use and keep the result. Knows compilers, caches and dlopen; nothing of attention.

toolchain  finds nvcc                 cache     entries on disk, sound under crashes, races and other users
compiler   one unit to one .so        entry     sizes and digests of an entry's files
load       dlopen of a checked .so    trust     whose files may be opened
prebuild   many units at once         layout    names in the cache: what is its own
                                      lock      who may build or remove an entry
                                      contents  what a cache holds, and emptying it
"""

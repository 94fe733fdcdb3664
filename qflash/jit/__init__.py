"""Compile CUDA sources on first use and keep the result. Knows compilers, caches and dlopen; nothing of attention.

toolchain  finds nvcc                 cache     entries on disk, sound under crashes, races and other users
runtime    libcudart, one for all     entry     sizes and digests of an entry's files
compiler   one unit to one .so        trust     whose files may be opened
load       dlopen of a checked .so    layout    names in the cache: what is its own
prebuild   many units at once         prebuilt  which entry serves where there is no compiler
                                      lock      who may build or remove an entry
                                      contents  what a cache holds, and emptying it
"""

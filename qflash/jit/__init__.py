"""Compile CUDA sources on first use and keep the result. Knows compilers, caches and dlopen; nothing of attention.

toolchain  finds nvcc          cache     entries on disk, sound under crashes and races
compiler   one unit to one .so  load      dlopen, with one retry over a damaged entry
prebuild   many units at once
"""

# bin/profile_<kernel>: one kernel, one specialisation, no Python; for ncu, cuda-gdb and compute-sanitizer.
#
#   make KERNEL=fa NVCC_ARCH=90          any folder of qflash/csrc/kernels/attention
#   NVCC_ARCH   75, 80, 86, 89, 90 …     (default: the GPU at hand, else 90); PTX goes in too, so a later GPU runs it
#   HEAD_DIM    32, 64, 96, 128, 192, 256  largest head_dim it serves (default 128)
#   DTYPE       float32, float16, bfloat16 (default float16)
#   DEBUG=1     device debug information (-g -G) for cuda-gdb, instead of optimised code with line numbers
#   NVCC        the compiler, NVCC_FLAGS what else it should be told

NVCC ?= nvcc
HEAD_DIM ?= 128
DTYPE ?= float16
ifndef NVCC_ARCH
  NVCC_ARCH := $(or $(subst .,,$(firstword $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null))),90)
endif

CSRC := qflash/csrc
OBJECTS := build/standalone
DTYPE_INDEX := $(if $(filter float32,$(DTYPE)),0,$(if $(filter float16,$(DTYPE)),1,$(if $(filter bfloat16,$(DTYPE)),2)))

ATTENTION := $(patsubst $(CSRC)/kernels/attention/%/launch.cu,%,$(wildcard $(CSRC)/kernels/attention/*/launch.cu))

SIXTEEN_BITS := fa_tc fa_mma fa_int8 sm90_fwd sm90_int8

ifdef KERNEL
  ifeq ($(filter $(KERNEL),$(ATTENTION)),)
    $(error KERNEL is '$(KERNEL)'; allowed: $(ATTENTION))
  endif
  ifeq ($(DTYPE_INDEX),)
    $(error DTYPE is '$(DTYPE)'; allowed: float32, float16, bfloat16)
  endif
  ifneq ($(and $(filter float32,$(DTYPE)),$(filter $(SIXTEEN_BITS),$(KERNEL))),)
    $(error DTYPE is 'float32'; allowed: float16, bfloat16, as $(KERNEL) multiplies 16 bits)
  endif
  ifeq ($(shell echo '$(NVCC_ARCH)' | grep -Ex '[0-9]{2,3}a?'),)
    $(error NVCC_ARCH is '$(NVCC_ARCH)'; allowed: a compute capability times ten, as 80 or 90)
  endif
  ifneq ($(shell test '$(NVCC_ARCH:a=)' -ge 75 || echo below),)
    $(error NVCC_ARCH is '$(NVCC_ARCH)'; allowed: 75 or more)
  endif
  ifneq ($(and $(filter bfloat16,$(DTYPE)),$(filter $(SIXTEEN_BITS),$(KERNEL)),$(filter 75,$(NVCC_ARCH))),)
    $(error DTYPE is 'bfloat16'; allowed: float16, as bfloat16 needs the tensor cores of compute capability 8.0)
  endif
  ifeq ($(filter 32 64 96 128 192 256,$(HEAD_DIM)),)
    $(error HEAD_DIM is '$(HEAD_DIM)'; allowed: 32, 64, 96, 128, 192, 256)
  endif
  ifneq ($(and $(filter sm90_%,$(KERNEL)),$(filter-out 90 90a,$(NVCC_ARCH))),)
    $(error NVCC_ARCH is '$(NVCC_ARCH)'; allowed: 90, as $(KERNEL) is for Hopper alone)
  endif
  .DEFAULT_GOAL := standalone
endif

# Hopper's own instructions need the "a".
TARGET := $(patsubst 90,90a,$(NVCC_ARCH))
SPECIALISATION := -DQF_KERNEL=$(KERNEL) -DQF_ARCH=$(NVCC_ARCH:a=) -DQF_HEAD_DIM=$(HEAD_DIM) -DQF_DTYPE=$(DTYPE_INDEX) \
  -DQF_PRECISION=$(if $(findstring int8,$(KERNEL)),QF_INT8,QF_NATIVE) -DQF_KV_KIND=QF_KV_ARRAYS \
  -DQF_BATCH_INVARIANT=0
NVCC_COMMAND = $(NVCC) -std=c++17 $(if $(DEBUG),-g -G,-O3 -lineinfo) -cudart static \
  -gencode 'arch=compute_$(TARGET),code=[sm_$(TARGET),compute_$(TARGET)]' -I$(CSRC) -I$(CSRC)/include $(SPECIALISATION)

# The CPU engine's forward pass, compiled as CMakeLists.txt compiles it.
ENGINE_FLAGS := -std=c++17 -O3 -Wall -Wextra -I$(CSRC)/include -I$(CSRC)/cpu
ISA_FLAGS_generic :=
ISA_FLAGS_avx2 := -mavx2 -mfma -mf16c
ISA_FLAGS_avx512 := $(ISA_FLAGS_avx2) -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512 \
  -Wno-uninitialized -Wno-maybe-uninitialized
ISAS := generic $(if $(filter x86_64 amd64,$(shell uname -m)),avx2 avx512)
ENGINE := $(patsubst %,$(OBJECTS)/%.o,checks engine isa memory status threads $(ISAS:%=forward-%))
HEADERS := $(wildcard $(foreach depth,*/* */*/*,$(addprefix $(CSRC)/$(depth),.h .cuh .inl)))

.PHONY: standalone always

standalone: bin/profile_$(KERNEL) ## with KERNEL=<name> NVCC_ARCH=<XX>: bin/profile_<name> for ncu and the debugger

bin/profile_$(KERNEL): $(CSRC)/kernels/attention/$(KERNEL)/launch.cu $(CSRC)/standalone/main.cu $(ENGINE) $(HEADERS) \
    $(OBJECTS)/$(KERNEL).command
	@mkdir -p bin
	$(NVCC_COMMAND) -o $@ $(filter %.cu %.o,$^) -lpthread $(NVCC_FLAGS)

# Changes when the command does, so that another NVCC_ARCH or DTYPE rebuilds the binary.
$(OBJECTS)/$(KERNEL).command: always
	@mkdir -p $(@D); echo "$(NVCC_COMMAND) $(NVCC_FLAGS)" | cmp -s - $@ || echo "$(NVCC_COMMAND) $(NVCC_FLAGS)" > $@

$(OBJECTS)/forward-%.o: $(CSRC)/cpu/forward.cc $(HEADERS)
	@mkdir -p $(@D)
	$(CXX) $(ENGINE_FLAGS) -fno-exceptions -fno-math-errno -DQF_ISA=$* $(ISA_FLAGS_$*) -c $< -o $@

$(OBJECTS)/%.o: $(CSRC)/cpu/%.cc $(HEADERS)
	@mkdir -p $(@D)
	$(CXX) $(ENGINE_FLAGS) -c $< -o $@

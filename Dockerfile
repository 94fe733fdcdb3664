# qflash with CUDA, for a machine that has NVIDIA's container runtime.
#
#   docker build -t qflash .
#   docker run --rm --gpus all qflash
#
# The image is NVIDIA's with nvcc, which compiles kernels on first use, and the steps are the README's two commands.
# There is no GPU while an image is built: `make test` then tests what needs none, and `make run` finds one later.
#
# Tried: that this file names the commands, and files and versions that exist (tests/unit/test_docker.py). Not tried, for
# want of a container runtime: building the image, and running it.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /qflash
COPY . .

# As `make GPU=yes ...`: the environment is set up for the GPU that will be there.
ENV MAKEFLAGS=GPU=yes
RUN make test
CMD ["make", "run"]

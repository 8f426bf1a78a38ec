# The GPU stack for x86_64 and Hopper, pinned: docs/container.md. Build with BuildKit:
#   docker build -t megatron_stapo .
# Python packages are those of tools/requirements-gpu.txt, the closure of setup.py's version table.

# CUDA 13.0 is what torch 2.13 is built with: apex refuses to be compiled with another one.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04 AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Ubuntu's archive keeps one version of a package, so that pinning one would break the next build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/stapo PATH=/opt/stapo/bin:$PATH UV_LINK_MODE=copy UV_NO_CACHE=1
RUN python3.12 -m venv "$VIRTUAL_ENV" && pip install --no-cache-dir uv==0.13.9
COPY tools/requirements-gpu.txt /build/
# --no-deps: the table is complete, and holds overrides that the packages' own pins exclude.
RUN grep -v '^transformer-engine-torch==' /build/requirements-gpu.txt > /build/first.txt \
    && uv pip install --no-deps -r /build/first.txt

# What is compiled against the torch above. 9.0 is Hopper; add 10.0 for precision.fp8=mxfp8.
ARG CUDA_ARCHS=9.0
ARG MAX_JOBS=8
ENV TORCH_CUDA_ARCH_LIST=$CUDA_ARCHS MAX_JOBS=$MAX_JOBS NVCC_APPEND_FLAGS="--threads 4"
RUN uv pip install pybind11==3.1.0 wheel==0.48.0
# Its setup.py would otherwise fetch a wheel that somebody else has compiled.
RUN grep '^transformer-engine-torch==' /build/requirements-gpu.txt > /build/then.txt \
    && NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE \
       uv pip install --no-deps --no-build-isolation -r /build/then.txt
# NVIDIA's source: the package index holds another program under this name.
ARG APEX_COMMIT=575968bc1f9127ccd61003a681472a83af4ff1a1
RUN git init --quiet /build/apex \
    && git -C /build/apex fetch --quiet --depth 1 https://github.com/NVIDIA/apex.git "$APEX_COMMIT" \
    && git -C /build/apex checkout --quiet FETCH_HEAD \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD=$MAX_JOBS \
       uv pip install --no-deps --no-build-isolation /build/apex
COPY setup.py pyproject.toml README.md LICENSE /build/stapo/
COPY megatron_stapo /build/stapo/megatron_stapo
COPY recipes /build/stapo/recipes
RUN uv pip install --no-deps --no-build-isolation /build/stapo \
    && uv pip uninstall pybind11 uv wheel

# A compiler stays in the image: Triton, FlashInfer and DeepGEMM compile kernels when they are used.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
       ibverbs-providers libibverbs1 libnuma1 librdmacm1 python3.12-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 stapo \
    && install --directory --owner=stapo /workspace
COPY --from=build /opt/stapo /opt/stapo
ENV PATH=/opt/stapo/bin:$PATH
USER 10001
WORKDIR /workspace
CMD ["stapo", "--help"]

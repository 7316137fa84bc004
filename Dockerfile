# An image with megatrain_torch, torch and the command line, built from this folder.
#
#   docker build -t megatrain .                                   # CPU
#   docker build -t megatrain --build-arg VARIANT=cuda .          # NVIDIA GPUs, driver 580 or newer
#   docker run --rm --gpus all -v "$PWD:/data" megatrain train Qwen/Qwen2.5-7B my.jsonl --out runs/mine
#
# docs/install.md says more. One Ubuntu for building and running, so that one glibc serves both.
ARG VARIANT=cpu

FROM ubuntu:24.04 AS toolkit-cpu
ENV MEGATRAIN_CUDA=0

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS toolkit-cuda
ENV MEGATRAIN_CUDA=1

FROM toolkit-${VARIANT} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc g++ libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY setup.py pyproject.toml MANIFEST.in README.md LICENSE /src/
COPY csrc /src/csrc
COPY megatrain_torch /src/megatrain_torch
ENV MEGATRAIN_LABEL=1
RUN python3 -m venv /tools && /tools/bin/pip wheel --no-cache-dir --no-deps -w /wheels /src

FROM ubuntu:24.04
ARG VARIANT
ARG TORCH="torch>=2.10"
# The compilers are for torch.compile and Triton, which a model's own code may call.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc g++ libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv \
    && case "$VARIANT" in cuda) build=cu130 ;; *) build=cpu ;; esac \
    && /opt/venv/bin/pip install --no-cache-dir "$TORCH" --index-url "https://download.pytorch.org/whl/$build"
COPY --from=build /wheels /wheels
RUN /opt/venv/bin/pip install --no-cache-dir "$(echo /wheels/*.whl)[cli]"
ENV PATH=/opt/venv/bin:$PATH
COPY tests/run_smoke.py /opt/
RUN python /opt/run_smoke.py
WORKDIR /data
ENTRYPOINT ["megatrain"]
CMD ["--help"]

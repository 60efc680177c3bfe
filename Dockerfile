# Tunesmith in a container: docker build -t tunesmith . (see docs/several-machines.md)
# BASE: an image of Debian or Ubuntu whose python3 is 3.11 to 3.13, or that can install one; for instance one of
# nvidia/cuda. TORCH: cpu, or cuda, whose wheels bring all but the driver, which is the host's. PIP_EXTRA_INDEX_URL: for
# TORCH=cpu, PyTorch's index of CPU wheels; without it the image gets the wheels for CUDA, which run on a CPU as well.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}
ARG TORCH=cpu
ARG PIP_EXTRA_INDEX_URL
# g++ builds the kernels of torch.compile and DeepSpeed, when they are first used.
# hadolint ignore=DL3008
RUN apt-get update -q \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends g++ make \
    && { python3 -c "import ensurepip, venv" \
         || DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends python3-dev python3-venv; } \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/tunesmith
COPY . .
RUN PIP_NO_CACHE_DIR=1 make .venv/.app TORCH=${TORCH} && .venv/bin/python -m compileall -q app trainers ui
# A user by number, as each base has others; USER is for libraries that ask for the user's name. Only /tmp and /shared
# need to be writable.
RUN install -d -o 1000 -g 1000 /shared
USER 1000:1000
ENV PATH=/opt/tunesmith/.venv/bin:$PATH USER=tunesmith HOME=/tmp HF_HOME=/shared/huggingface XDG_CACHE_HOME=/shared/cache
WORKDIR /shared
VOLUME /shared
EXPOSE 7860
# On all addresses of the container, so with a password: TUNESMITH_UI_PASSWORD.
CMD ["tunesmith", "ui", "--host", "0.0.0.0", "--port", "7860", "--auth", "tunesmith"]
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7860', timeout=5)"]

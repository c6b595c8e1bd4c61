# The suite and ddp_impl on NVIDIA GPUs, with NCCL. The image has the torch of its base, whatever ci/constraints.txt says:
#
#     docker build --file ci/containers/cuda.Dockerfile --tag ddp-conformance:cuda .
#     docker run --rm --gpus all --ipc host --volume "$PWD:/work" ddp-conformance:cuda run --backend nccl --profile gpu
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime
FROM ${BASE}

COPY . /source
# The base's Python may be marked as managed by its system; a container has no other programs that rely on it.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN pip install --no-cache-dir "/source[suite,signatures]" && rm -rf /source && useradd --create-home tester

USER tester
WORKDIR /work
ENTRYPOINT ["ddp-conformance"]
CMD ["doctor"]

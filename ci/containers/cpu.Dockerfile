# The suite and ddp_impl on CPUs, with gloo:
#
#     docker build --file ci/containers/cpu.Dockerfile --tag ddp-conformance .
#     docker run --rm --shm-size 1g --volume "$PWD:/work" ddp-conformance run --ddp my_pkg:MyDDP
FROM python:3.12-slim

# g++ builds the simulated device of `--backend sim`.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

COPY . /source
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
        --constraint /source/ci/constraints.txt "/source[suite,signatures]" \
    && rm -rf /source && useradd --create-home tester

USER tester
WORKDIR /work
ENTRYPOINT ["ddp-conformance"]
CMD ["doctor"]

# The server in an image; the model comes from the hub or a mounted folder, the small one is inside.
#   docker build -t verl-tinker:cpu .
#   docker build -t verl-tinker:cuda --build-arg DEVICE=cuda --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 .
# With a folder of local wheels: --build-context wheels=FOLDER (BuildKit).
ARG BASE=debian:bookworm-slim
FROM scratch AS wheels

FROM ${BASE}
ARG DEVICE=cpu
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    python3 python3-venv git ca-certificates libnuma1 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/verl-tinker
COPY . .
RUN --mount=type=bind,from=wheels,target=/wheels \
    if ls /wheels/*.whl > /dev/null 2>&1; then export PIP_FIND_LINKS=/wheels; fi; \
    PIP_NO_CACHE_DIR=1 ./install_verl.sh --device "$DEVICE" && .venv/bin/uv cache clean -q
ENV PATH=/opt/verl-tinker/.venv/bin:$PATH TINKER_CHECKPOINT_DIR=/data/checkpoints
VOLUME /data
EXPOSE 8000
# On a public address the server wants keys: docs/operations.md has the command.
ENTRYPOINT ["verl-tinker"]
CMD ["start"]

# The server over SmolLM2-135M, on a CPU: docker build -t graphdecode .
# On a GPU: docker build --build-arg TORCH=cuda -t graphdecode . and docker run --gpus all
FROM python:3.12-slim

# compiles the C kernels for the processor at hand, and Triton's launchers
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH=cpu
ENV PIP_NO_CACHE_DIR=1
WORKDIR /opt/graphdecode
COPY constraints.txt .
# the CPU build is gigabytes smaller; not every index has one by that name
RUN torch="$(sed -n 's/^torch==//p' constraints.txt)" \
    && if [ "$TORCH" = cuda ] || ! pip install "torch==$torch+cpu"; then pip install "torch==$torch"; fi
COPY pyproject.toml README.md LICENSE ./
COPY graphdecode graphdecode
COPY kernels kernels
RUN pip install --constraint constraints.txt ".[serve]" \
    && graphdecode models install smollm2

RUN useradd --create-home graphdecode
USER graphdecode
WORKDIR /home/graphdecode
# compiled kernels and measured choices; a volume keeps them for the next container
ENV GRAPHDECODE_CACHE_DIR=/home/graphdecode/.cache/graphdecode
EXPOSE 8000
HEALTHCHECK --start-period=5m CMD python -c "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health')"
ENTRYPOINT ["graphdecode"]
CMD ["serve", "--model", "smollm2", "--host", "0.0.0.0", "--port", "8000"]

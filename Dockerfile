# docker build -t secure-fed .
# docker run --rm --user "$(id -u)" -v "$PWD:/work" secure-fed
#
# The demo on the CPU, with its report in ./runs. Another command: docker run ... secure-fed secure-fed train run.toml
# Extras: docker build --build-arg EXTRAS=[flower] ...
FROM python:3.11-slim
ARG EXTRAS=""
COPY . /src
# The other index has torch without CUDA, which is a tenth of the size.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c /src/constraints.txt "/src$EXTRAS" \
    && rm -rf /src
ENV HOME=/tmp
USER 1000
WORKDIR /work
CMD ["secure-fed", "demo"]

"""The shipped proxy, secure_fed/flower/nginx.conf, in a real nginx on free ports of this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from secure_fed.flower.project import PROXY, SUPERLINK
from tests.flower_loopback import HOST, free_port

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light")

# What Debian's nginx.conf has around a file of conf.d, with this folder in place of the system's.
_AROUND = """
{user} daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    include {folder}/secure-fed.conf;
}}
"""


@contextmanager
def proxy(folder: Path, superlink: int, certificates: Path) -> Iterator[int]:
    """The port of a proxy in front of the SuperLink's port. certificates: the folder with ca.pem, server.pem and server.key."""
    port = free_port()
    text = PROXY.read_text(encoding="utf-8")
    for said, meant in {
        "listen 443": f"listen {HOST}:{port}",
        SUPERLINK: f"{HOST}:{superlink}",
        "/etc/secure-fed": str(certificates),
    }.items():
        assert said in text
        text = text.replace(said, meant)
    folder.mkdir()
    user = "" if os.getuid() else "user root;"  # another one could not enter the folders of tests
    (folder / "secure-fed.conf").write_text(text, encoding="utf-8")
    (folder / "nginx.conf").write_text(_AROUND.format(folder=folder, user=user), encoding="utf-8")
    assert NGINX is not None
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=output)
    try:
        until = time.monotonic() + 20
        while not _listens(port):
            assert process.poll() is None, (folder / "output").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(20)


def _listens(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex((HOST, port)) == 0

"""Runs inside a sandbox, by the path it was written to: reads requests from the model service's log and appends answers.

Owns the log's format as rl-rock 1.11 writes it. Needs nothing but Python. What it prints is one line of base64.

    exchange.py fetch LOG OFFSET SECONDS          # what came after OFFSET; waits for it up to SECONDS
    exchange.py answer LOG INDEX again|once TEXT  # TEXT: packed JSON, or @FILE that holds it
    exchange.py free PORT                         # may a service listen there?
"""

import base64
import fcntl
import json
import os
import socket
import sys
import time
import zlib

REQUEST, REQUEST_END = "LLM_REQUEST_START", "LLM_REQUEST_END"
RESPONSE, RESPONSE_END = "LLM_RESPONSE_START", "LLM_RESPONSE_END"
END = "SESSION_END"
MARKS = (REQUEST, REQUEST_END, RESPONSE, RESPONSE_END, END)
POLL_SECONDS = 0.05


def pack(value):
    """JSON, compressed, as letters that any channel carries."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def unpack(text):
    return json.loads(zlib.decompress(base64.b64decode(text)))


def fetch(log, offset, seconds):
    """Requests and indices of answers in the whole lines from `offset` on, the offset after them, and the log's identity."""
    limit = time.monotonic() + seconds
    while True:
        size, text = read_from(log, offset)
        text = text[: text.rfind(b"\n") + 1]
        found = read_lines(text.decode("utf-8", "replace"))
        if found["requests"] or found["ended"] or size < offset or time.monotonic() >= limit:
            return {**found, "offset": offset + len(text), "shrunk": size < offset, "born": born(log)}
        time.sleep(POLL_SECONDS)


def read_from(log, offset):
    """The log's size and what it has after `offset`; one that is not there is empty."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(min(offset, size))
            return size, file.read()
    except FileNotFoundError:
        return 0, b""


def read_lines(text):
    requests, answered, ended = [], [], False
    for line in text.split("\n"):
        if line.startswith(REQUEST):
            body, _, meta = line[len(REQUEST):].rpartition(REQUEST_END)
            requests.append({"index": json.loads(meta)["index"], "body": json.loads(body), "poisoned": END in body})
        elif line.startswith(RESPONSE) and RESPONSE_END in line:
            answered.append(json.loads(line.rpartition(RESPONSE_END)[2])["index"])
        elif line.strip() == END:
            ended = True
    return {"requests": requests, "answered": answered, "ended": ended}


def born(log):
    """When the first request came: another time is another log."""
    try:
        with open(log, encoding="utf-8", errors="replace") as file:
            first = file.readline()
    except FileNotFoundError:
        return None
    return json.loads(first.rpartition(REQUEST_END)[2])["timestamp"] if first.startswith(REQUEST) else None


def answer(log, index, again, body):
    """Append the answer in one write, unless it is there already and is not to be sent again."""
    text = json.dumps(body)
    for mark in MARKS:  # The service would take them for its own.
        text = text.replace(mark, mark.replace("_", "\\u005f"))
    line = RESPONSE + text + RESPONSE_END + json.dumps({"timestamp": int(time.time() * 1000), "index": index}) + "\n"
    with open(log, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        there = index in read_lines(file.read().decode("utf-8", "replace"))["answered"]
        if there and not again:
            return "already"
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    return "again" if there else "appended"


def free(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            return error.strerror
    return ""


def main(arguments):
    if arguments[0] == "free":
        return free(int(arguments[1]))
    if arguments[0] == "fetch":
        return fetch(arguments[1], int(arguments[2]), float(arguments[3]))
    log, index, again, text = arguments[1:5]
    if text.startswith("@"):
        with open(text[1:]) as file:
            text = file.read()
        os.unlink(arguments[4][1:])
    return answer(log, int(index), again == "again", unpack(text))


if __name__ == "__main__":
    print(pack(main(sys.argv[1:])))

#!/usr/bin/env bash
# Installs Chromium for tests/dashboard where none is; from Debian's packages, as root.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "tests/dashboard needs Chromium; install the package chromium" >&2
    exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null

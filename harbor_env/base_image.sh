#!/usr/bin/env bash
# A Debian image with Python and git from the packages of the distribution, for machines that reach no image registry.
#   base_image.sh NAME [SUITE]   as root; needs a Docker engine and debootstrap (docker_engine.sh)
# Certificates that this machine's administrator has added are added to the image too.
set -euo pipefail
name="${1:?the image\'s name}"; suite="${2:-trixie}"
! docker image inspect "$name" > /dev/null 2>&1 || { echo "base_image: $name is there"; exit 0; }
place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
uri="$(awk '/^URIs:/{print $2; exit}' /etc/apt/sources.list.d/debian.sources 2>/dev/null || true)"
debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,git,curl,procps "$suite" "$place/tree" $uri \
    > "$place/log" 2>&1 || { tail -n 5 "$place/log" >&2; echo "base_image: debootstrap failed" >&2; exit 1; }
for certificate in /usr/local/share/ca-certificates/*.crt; do
    [ -f "$certificate" ] && cp "$certificate" "$place/tree/usr/local/share/ca-certificates/"
done
chroot "$place/tree" update-ca-certificates > /dev/null 2>&1
rm -rf "$place"/tree/var/cache/apt/archives/*.deb "$place"/tree/var/lib/apt/lists/* "$place"/tree/usr/share/{doc,man,locale}
authorities=/etc/ssl/certs/ca-certificates.crt
tar -C "$place/tree" -c . | docker import -c 'CMD ["/bin/bash"]' \
    -c "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin SSL_CERT_FILE=$authorities PIP_CERT=$authorities REQUESTS_CA_BUNDLE=$authorities" \
    - "$name" > /dev/null
echo "base_image: $name is made from Debian $suite"

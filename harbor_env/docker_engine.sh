#!/usr/bin/env bash
# A Docker engine from nothing, for machines without one (Debian 12 or newer, as root).
#   docker_engine.sh start FOLDER   install what is missing, run dockerd below FOLDER, wait until it answers
#   docker_engine.sh stop FOLDER    end that dockerd, its containers with it
# An engine that answers already is used and left alone. Published ports are on loopback.
set -euo pipefail
action="${1:-}"; folder="${2:-}"
[ -n "$folder" ] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# Bookworm's engine cannot run privileged containers where a capability is missing; newer ones ask only for what there is,
# and bring Compose V2, which Harbor needs. containerd and runc are the release's own.
packages=(containerd runc iptables debootstrap)
newer=(docker.io docker-compose docker-buildx)

install() {
    [ "$(id -u)" = 0 ] || { echo "docker_engine: not root; install Docker by hand, or run this as root" >&2; exit 1; }
    . /etc/os-release
    export DEBIAN_FRONTEND=noninteractive
    if [ "${VERSION_CODENAME:-}" != bookworm ]; then
        apt-get -qq update && apt-get -qq install -y --no-install-recommends "${packages[@]}" "${newer[@]}" > /dev/null
        return
    fi
    local place uri; place="$(mktemp -d)"
    mkdir -p "$place"/{sources,preferences,lists/partial}
    cp /etc/apt/sources.list.d/debian.sources "$place/sources/"
    uri="$(awk '/^URIs:/{print $2; exit}' /etc/apt/sources.list.d/debian.sources)"
    printf 'Types: deb\nURIs: %s\nSuites: trixie\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' \
        "$uri" > "$place/sources/trixie.sources"
    printf 'Package: *\nPin: release n=trixie\nPin-Priority: 100\n' > "$place/preferences/trixie"
    local options=(-qq -o APT::Sandbox::User=root -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$place/sources"
                   -o "Dir::Etc::preferencesparts=$place/preferences" -o "Dir::State::lists=$place/lists")
    apt-get "${options[@]}" update
    apt-get "${options[@]}" install -y --no-install-recommends "${packages[@]}" "${newer[@]/%//trixie}" > /dev/null
    rm -rf "$place"
}

case "$action" in
start)
    if docker info > /dev/null 2>&1; then echo "docker_engine: one answers already"; exit 0; fi
    command -v dockerd > /dev/null && command -v debootstrap > /dev/null && docker compose version > /dev/null 2>&1 || install
    mkdir -p "$folder"
    # The mtu of the default route, because packets above it would be lost on the bridge.
    mtu="$(cat "/sys/class/net/$(awk '$2 == "00000000" {print $1; exit}' /proc/net/route)/mtu" 2>/dev/null || echo 1400)"
    setsid dockerd --data-root "$folder/data" --exec-root "$folder/exec" --pidfile "$folder/dockerd.pid" --mtu "$mtu" \
        -H unix:///var/run/docker.sock --ip 127.0.0.1 > "$folder/dockerd.log" 2>&1 < /dev/null &
    for _ in $(seq 60); do
        docker info > /dev/null 2>&1 && { echo "docker_engine: runs as process $(cat "$folder/dockerd.pid")"; exit 0; }
        sleep 1
    done
    echo "docker_engine: dockerd does not answer; the end of $folder/dockerd.log:" >&2
    tail -n 5 "$folder/dockerd.log" >&2
    exit 1;;
stop)
    [ -f "$folder/dockerd.pid" ] || exit 0
    pid="$(cat "$folder/dockerd.pid")"
    kill "$pid" 2>/dev/null || true
    for _ in $(seq 60); do kill -0 "$pid" 2>/dev/null || break; sleep 0.5; done
    ! kill -0 "$pid" 2>/dev/null || kill -9 "$pid";;
*)
    echo "docker_engine: say start or stop" >&2; exit 2;;
esac

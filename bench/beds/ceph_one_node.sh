#!/usr/bin/env bash
# A Ceph cluster of one monitor, one manager, one OSD and one S3 gateway on loopback, without systemd or cephadm.
#
#   ceph_one_node.sh start DIR [RGW_PORT] [ACCESS_KEY] [SECRET_KEY]    prints "URL ACCESS_KEY SECRET_KEY" when it serves
#   ceph_one_node.sh stop DIR                                          ends its daemons; DIR stays
#
# Needs Debian's ceph-mon, ceph-mgr, ceph-osd and radosgw, and root. Everything it writes is in DIR.
#   OBJECTSTORE   bluestore (default; a file in DIR) or memstore
#   OSD_GIB       size of the store, default 8 (the file is sparse)
#   CACHE_GIB     memory the OSD may use for itself and its cache, default 4
#   MON_PORT      default 3300
set -euo pipefail

usage() {
  sed -n '4,5s/^# *//p' "$0" >&2
  exit 2
}

[ $# -ge 2 ] || usage
action=$1
mkdir -p "$2"
dir=$(readlink -f "$2")
rgw_port=${3:-7480}
access_key=${4:-ceph-access}
secret_key=${5:-ceph-secret-key}
mon_port=${MON_PORT:-3300}
osd_gib=${OSD_GIB:-8}
export CEPH_CONF=$dir/ceph.conf

# until_true TRIES COMMAND...: two tries a second
until_true() {
  local tries=$1
  shift
  while ! "$@" >/dev/null 2>&1; do
    tries=$((tries - 1))
    [ "$tries" -gt 0 ] || return 1
    sleep 0.5
  done
}

gone() { ! kill -0 "$1" 2>/dev/null; }
monitor_answers() { timeout 5 ceph -s; }
osd_is_up() { timeout 5 ceph osd stat | grep -q '1 up'; }
gateway_answers() { curl --noproxy '*' -fs "http://127.0.0.1:$rgw_port/"; }

stop() {
  local name pid
  for name in client.rgw.a osd.0 mgr.x mon.a; do
    pid=$(cat "$dir/run/$name.pid" 2>/dev/null) || continue
    kill "$pid" 2>/dev/null || continue
    until_true 20 gone "$pid" || kill -9 "$pid" 2>/dev/null || true
  done
}

write_config() {
  cat >"$CEPH_CONF" <<EOF
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon initial members = a
mon host = [v2:127.0.0.1:$mon_port/0]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
ms bind ipv6 = false
keyring = $dir/\$name.keyring
mon data = $dir/mon
mgr data = $dir/mgr
osd data = $dir/osd
run dir = $dir/run
pid file = $dir/run/\$name.pid
admin socket = $dir/run/\$name.asok
log file = $dir/log/\$name.log
crash dir = $dir/log
# one copy on one node is what is wanted
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
mon warn on pool no redundancy = false
osd crush chooseleaf type = 0
osd pool default pg num = 8
osd pool default pg autoscale mode = off
mon max pg per osd = 1000
# a disk that is fuller than Ceph likes must not stop it
mon data avail warn = 2
mon data avail crit = 1
osd objectstore = ${OBJECTSTORE:-bluestore}
osd memory target = $((${CACHE_GIB:-4} << 30))
bluestore block create = true
bluestore block size = $((osd_gib << 30))
memstore device bytes = $((osd_gib << 30))
[client.rgw.a]
# without tcp_nodelay (off by default) small answers wait 40 ms for a delayed acknowledgement
rgw frontends = beast endpoint=127.0.0.1:$rgw_port tcp_nodelay=1
# a bucket may also be named by the Host header alone
rgw dns name = localhost
rgw enable usage log = false
rgw enable ops log = false
# deleted objects give their space back at once when asked to
rgw gc obj min wait = 1
EOF
}

make_monitor() {
  ceph-authtool --create-keyring "$dir/client.admin.keyring" --gen-key -n client.admin \
    --cap mon 'allow *' --cap mgr 'allow *' --cap osd 'allow *' >/dev/null
  ceph-authtool --create-keyring "$dir/mon.a.keyring" --gen-key -n mon. --cap mon 'allow *' >/dev/null
  ceph-authtool "$dir/mon.a.keyring" --import-keyring "$dir/client.admin.keyring" >/dev/null
  monmaptool --create --clobber --fsid "$(sed -n 's/^fsid = //p' "$CEPH_CONF")" \
    --addv a "[v2:127.0.0.1:$mon_port/0]" "$dir/monmap" >/dev/null
  ceph-mon --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/mon.a.keyring"
}

make_other_daemons() {
  local osd_uuid
  osd_uuid=$(cat /proc/sys/kernel/random/uuid)
  ceph auth get-or-create mgr.x mon 'allow profile mgr' osd 'allow *' mds 'allow *' -o "$dir/mgr.x.keyring"
  ceph osd new "$osd_uuid" >/dev/null
  ceph auth get-or-create osd.0 mon 'allow profile osd' mgr 'allow profile osd' osd 'allow *' -o "$dir/osd.0.keyring"
  ceph-osd --mkfs -i 0 --osd-uuid "$osd_uuid" >/dev/null 2>&1
  ceph auth get-or-create client.rgw.a mon 'allow rw' mgr 'allow rw' osd 'allow rwx' -o "$dir/client.rgw.a.keyring"
}

start() {
  local is_new=
  mkdir -p "$dir"/{run,log,mon,mgr,osd}
  if [ ! -e "$dir/ready" ]; then
    is_new=1
    write_config
    make_monitor
  fi
  ceph-mon -i a
  until_true 40 monitor_answers
  [ -z "$is_new" ] || make_other_daemons
  ceph-mgr -i x
  ceph-osd -i 0 >/dev/null
  ceph osd crush add osd.0 1.0 host=localhost root=default >/dev/null 2>&1 || true
  until_true 60 osd_is_up
  radosgw -n client.rgw.a
  until_true 120 gateway_answers || {
    echo "radosgw does not answer; its log is in $dir/log" >&2
    return 1
  }
  if [ -n "$is_new" ]; then
    radosgw-admin user create --uid local --display-name local \
      --access-key "$access_key" --secret-key "$secret_key" >/dev/null
    touch "$dir/ready"
  fi
  echo "http://127.0.0.1:$rgw_port $access_key $secret_key"
}

case $action in
  start) start ;;
  stop) stop ;;
  *) usage ;;
esac

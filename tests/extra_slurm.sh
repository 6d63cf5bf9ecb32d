#!/usr/bin/env bash
# Two hosts and a real Slurm on this machine, and on them tests/test_machines.py. Part of `make test-all`.
# Wants Linux and root; installs Debian's slurm-wlm, munge, iproute2 and iptables where they are missing. Exit 77: it
# could not.
#     tests/extra_slurm.sh                 the tests
#     tests/extra_slurm.sh --record        and writes ignite_ddl/course/recorded_machines.json, which chapter 23 shows
#     tests/extra_slurm.sh -- COMMAND...   a command on node1, such as: srun -n 4 hostname
# The hosts are network namespaces with names of their own, node1 and node2, joined by a cable (veth). All of it, the
# daemons and their files too, stands in namespaces that end with this script, by Ctrl-C as well.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
skip() { echo "slurm: SKIPPED: $1"; exit 77; }

if [ -z "${IGNITE_DDL_NODE2:-}" ]; then # not yet in namespaces of our own
    [ "$(uname -s)" = Linux ] || skip "network namespaces are Linux's"
    [ "$(id -u)" = 0 ] || skip "two hosts and Slurm's daemons need root: sudo env PATH=\"\$PATH\" bash $0"
    missing=
    for pair in slurmctld:slurm-wlm munged:munge ip:iproute2 iptables:iptables; do
        command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair##*:}"
    done
    if [ -n "$missing" ]; then
        command -v apt-get >/dev/null || skip "install Slurm, munge, iproute2 and iptables first"
        (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $missing) \
            >/dev/null || skip "apt-get install$missing failed: is there a network?"
    fi
    unshare --net true 2>/dev/null || skip "this container may not make network namespaces"
    export IGNITE_DDL_NODE2=soon
    set -m # a group of its own, which Ctrl-C leaves to the trap; unshare itself ignores SIGTERM
    setpriv --pdeathsig KILL unshare --fork --kill-child --pid --mount-proc --net --uts \
        bash tests/extra_slurm.sh "$@" &
    trap 'kill -KILL $!; exit 130' INT TERM
    status=0
    wait $! || status=$?
    exit $status
fi

# Process 1 of its own process namespace: when it ends, by whatever signal, the kernel ends all others.
mount -t tmpfs none /run
folder=/run/cluster
mkdir -p $folder/state
printf '127.0.0.1 localhost\n10.77.0.1 node1\n10.77.0.2 node2\n' >$folder/hosts
mount --bind $folder/hosts /etc/hosts
echo 'hosts: files' >$folder/nsswitch && mount --bind $folder/nsswitch /etc/nsswitch.conf # nobody answers for DNS

hostname node1
unshare --net --uts --mount sleep infinity &
export IGNITE_DDL_NODE2=$!
on2() { nsenter --target $IGNITE_DDL_NODE2 --net --uts --mount "$@"; }
until [ "$(readlink /proc/$IGNITE_DDL_NODE2/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
on2 hostname node2
mkdir /run/scratch && on2 mount -t tmpfs none /run/scratch # the local disk of each; all else is shared
ip link add eth1 type veth peer name eth1 netns $IGNITE_DDL_NODE2
ip link set lo up && ip address add 10.77.0.1/24 dev eth1 && ip link set eth1 up
on2 ip link set lo up && on2 ip address add 10.77.0.2/24 dev eth1 && on2 ip link set eth1 up

head -c 128 /dev/urandom >$folder/key && chmod 400 $folder/key
munged --force --socket=$folder/munge --key-file=$folder/key --log-file=$folder/munge.log --pid-file=$folder/munge.pid \
    --seed-file=$folder/seed 2>/dev/null
export SLURM_CONF=$folder/slurm.conf
cat >$SLURM_CONF <<END
ClusterName=two
SlurmctldHost=node1
SlurmUser=root
AuthInfo=socket=$folder/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=2
NodeName=node[1-2] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
slurmctld && slurmd && on2 slurmd
for _ in $(seq 100); do
    [ "$(sinfo -h -o %D -t idle 2>/dev/null)" = 2 ] && break
    sleep 0.2
done
[ "$(sinfo -h -o %D -t idle)" = 2 ] || { sinfo; tail -n 20 $folder/*.log; exit 1; }

tests="python -m pytest -q -p no:cacheprovider --basetemp /run/shared tests/test_machines.py"
case "${1:-}" in
--) shift && "$@" ;;
--record) shift && IGNITE_DDL_RECORD=1 $tests "$@" ;;
*) $tests "$@" ;;
esac

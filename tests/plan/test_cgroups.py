"""Limits of control groups, read from trees of files as kernels and container engines make them."""

import os
import shutil

import pytest

from ds_slide.plan import cgroups
from ds_slide.plan.cgroups import memory_limits

GIB = 1 << 30
NONE_1 = 9223372036854771712  # "no limit" of version 1
V2 = "35 24 0:30 {root} {point} rw,nosuid,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
V1 = "36 24 0:31 {root} {point} rw,nosuid,relatime shared:10 - cgroup cgroup rw,memory\n"
OTHERS = (
    "22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
    "34 24 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
)
STAT_2 = "anon 500\nfile 7000\nshmem 3000\nactive_file 1000\ninactive_file 3000\nslab_reclaimable 50\nslab 90\n"
STAT_1 = "cache 1\nactive_file 1\ninactive_file 1\ntotal_cache 7000\ntotal_active_file 1000\ntotal_inactive_file 3000\n"


@pytest.fixture
def system(tmp_path):
    """Makes /proc/self of these texts, and control groups of {path: {file: text or number}}."""

    def make(cgroup, mountinfo, groups):
        proc = tmp_path / "proc/self"
        proc.mkdir(parents=True)
        (proc / "cgroup").write_text(cgroup)
        (proc / "mountinfo").write_text(OTHERS + mountinfo)
        for path, files in groups.items():
            directory = tmp_path / path.lstrip("/")
            directory.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (directory / name).write_text(f"{text}\n")
        found = memory_limits(tmp_path)
        return [("/" + str(limit.file.relative_to(tmp_path)), limit.limit, limit.room) for limit in found]

    return make


def v2(limit="max", current=0, high="max", stat=STAT_2):
    return {"memory.max": limit, "memory.high": high, "memory.current": current, "memory.stat": stat}


def v1(limit=NONE_1, usage=0, stat=STAT_1, hierarchy=1):
    return {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": usage,
        "memory.stat": stat,
        "memory.use_hierarchy": hierarchy,
    }


def test_version_2_with_every_group_above(system):
    found = system(
        "0::/user.slice/job.scope\n",
        V2.format(root="/", point="/sys/fs/cgroup"),
        {
            "/sys/fs/cgroup": {"cgroup.controllers": "memory"},  # the topmost has no limit
            "/sys/fs/cgroup/user.slice": v2(4 * GIB, 3 * GIB),
            "/sys/fs/cgroup/user.slice/job.scope": v2("max", GIB),
        },
    )
    assert found == [("/sys/fs/cgroup/user.slice/memory.max", 4 * GIB, GIB + 4050)]


def test_the_lower_one_of_max_and_high(system):
    found = system(
        "0::/a/b\n",
        V2.format(root="/", point="/sys/fs/cgroup"),
        {
            "/sys/fs/cgroup/a": v2(8 * GIB, GIB, high=9 * GIB),
            "/sys/fs/cgroup/a/b": v2(8 * GIB, GIB, high=2 * GIB, stat=""),
        },
    )
    assert [(path, limit) for path, limit, _ in found] == [
        ("/sys/fs/cgroup/a/b/memory.high", 2 * GIB),
        ("/sys/fs/cgroup/a/memory.max", 8 * GIB),
    ]
    assert found[0][2] == GIB


def test_a_group_that_is_over_its_limit_has_no_room(system):
    mount = V2.format(root="/", point="/sys/fs/cgroup")
    assert system("0::/a\n", mount, {"/sys/fs/cgroup/a": v2(GIB, 2 * GIB)})[0][2] == 0


def test_more_page_cache_than_is_used_gives_no_more_than_the_limit(system):
    mount = V2.format(root="/", point="/sys/fs/cgroup")
    assert system("0::/a\n", mount, {"/sys/fs/cgroup/a": v2(GIB, 100)})[0][2] == GIB


def test_version_1(system):
    found = system(
        "9:name=systemd:/\n4:cpu,memory:/slurm/job 7/step_0\n0::/\n",
        V1.format(root="/", point="/sys/fs/cgroup/memory"),
        {
            "/sys/fs/cgroup/memory": v1(),
            "/sys/fs/cgroup/memory/slurm": v1(),
            "/sys/fs/cgroup/memory/slurm/job 7": v1(4 * GIB, 3 * GIB),
            "/sys/fs/cgroup/memory/slurm/job 7/step_0": v1(8 * GIB, GIB),
        },
    )
    assert found == [
        ("/sys/fs/cgroup/memory/slurm/job 7/step_0/memory.limit_in_bytes", 8 * GIB, 7 * GIB + 4000),
        ("/sys/fs/cgroup/memory/slurm/job 7/memory.limit_in_bytes", 4 * GIB, GIB + 4000),
    ]


def test_groups_above_that_do_not_count_what_lies_below(system):
    found = system(
        "4:memory:/a/b\n",
        V1.format(root="/", point="/sys/fs/cgroup/memory"),
        {"/sys/fs/cgroup/memory/a": v1(GIB, 0, hierarchy=0), "/sys/fs/cgroup/memory/a/b": v1(2 * GIB)},
    )
    assert [path for path, _, _ in found] == ["/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes"]


def test_both_versions_mounted(system):
    found = system(
        "4:memory:/a\n0::/b\n",
        V1.format(root="/", point="/sys/fs/cgroup/memory") + V2.format(root="/", point="/sys/fs/cgroup/unified"),
        {"/sys/fs/cgroup/memory/a": v1(2 * GIB), "/sys/fs/cgroup/unified/b": {"cgroup.procs": "1"}},
    )
    assert [path for path, _, _ in found] == ["/sys/fs/cgroup/memory/a/memory.limit_in_bytes"]


@pytest.mark.parametrize(
    ("cgroup", "root"),
    [
        ("0::/\n", "/"),  # a namespace of its own
        ("0::/docker/6f3a\n", "/docker/6f3a"),  # no namespace: the container's group is what is mounted
        ("0::/docker/6f3a\n", "/"),  # its path is the host's, and does not exist below the mount
        ("0::/../../job\n", "/"),  # the process was moved out of the namespace
        ("0::/\n", "/../.."),  # the mount was made outside of it
    ],
)
def test_containers_that_see_their_own_group_at_the_mount(system, cgroup, root):
    found = system(cgroup, V2.format(root=root, point="/sys/fs/cgroup"), {"/sys/fs/cgroup": v2(2 * GIB, GIB)})
    assert found == [("/sys/fs/cgroup/memory.max", 2 * GIB, GIB + 4050)]


OUTSIDE = V2.format(root="/../../..", point="/host")
INSIDE = V2.format(root="/", point="/sys/fs/cgroup")


@pytest.mark.parametrize("mountinfo", [OUTSIDE + INSIDE, INSIDE + OUTSIDE])
@pytest.mark.parametrize("cgroup", ["0::/\n", "0::/../moved\n"])
def test_a_mount_from_outside_of_the_container_is_not_its_own_group(system, mountinfo, cgroup):
    found = system(cgroup, mountinfo, {"/host": v2(9 * GIB), "/sys/fs/cgroup": v2(2 * GIB, GIB)})
    assert found == [("/sys/fs/cgroup/memory.max", 2 * GIB, GIB + 4050)]


def test_a_mount_from_outside_alone(system):
    """As with `docker run -v /sys/fs/cgroup:/sys/fs/cgroup`, which hides the container's own."""
    groups = {
        "/host": {"cgroup.controllers": "memory"},
        "/host/kube/pod/other/job": v2(GIB) | {"cgroup.procs": "1\n0"},
        "/host/kube/pod/own/job": v2("max") | {"cgroup.procs": f"1\n{os.getpid()}"},
        "/host/kube/pod/own": v2(2 * GIB),
        "/host/kube": v2(4 * GIB),
    }
    found = [(path, limit) for path, limit, _ in system("0::/job\n", OUTSIDE, groups)]
    assert found == [("/host/kube/pod/own/memory.max", 2 * GIB), ("/host/kube/memory.max", 4 * GIB)]


def test_a_process_that_was_moved_to_where_a_mount_from_outside_shows_it(system):
    found = system("0::/../../../job\n", OUTSIDE + INSIDE, {"/host/job": v2(GIB), "/sys/fs/cgroup": v2(2 * GIB)})
    assert [path for path, _, _ in found] == ["/host/job/memory.max"]


def test_lines_that_are_not_of_the_form(system):
    cgroup = "nonsense\n0:\n\n0::/a\n"
    assert len(system(cgroup, INSIDE, {"/sys/fs/cgroup/a": v2(GIB)})) == 1


def test_a_group_that_ends_while_it_is_read(system, monkeypatch):
    def end(directory, _version):
        if directory.name == "b":
            shutil.rmtree(directory)
        return 0

    monkeypatch.setattr(cgroups, "_reclaimable", end)
    found = system("0::/a/b\n", INSIDE, {"/sys/fs/cgroup/a": v2(2 * GIB), "/sys/fs/cgroup/a/b": v2(GIB)})
    assert [path for path, _, _ in found] == ["/sys/fs/cgroup/a/memory.max"]


def test_a_group_below_that_of_the_container(system):
    found = system(
        "4:memory:/kubepods/pod1/c1/worker\n",
        V1.format(root="/kubepods/pod1/c1", point="/sys/fs/cgroup/memory"),
        {"/sys/fs/cgroup/memory": v1(2 * GIB), "/sys/fs/cgroup/memory/worker": v1(GIB)},
    )
    assert [limit for _, limit, _ in found] == [GIB, 2 * GIB]


def test_a_mount_with_spaces_in_its_path(system):
    found = system("0::/a\n", V2.format(root="/", point=r"/odd\040place"), {"/odd place/a": v2(GIB)})
    assert found[0][0] == "/odd place/a/memory.max"


def test_nothing_to_read(system, tmp_path):
    assert system("", "", {}) == []
    assert memory_limits(tmp_path / "nowhere") == []


def test_text_that_is_no_number(system):
    mount = V2.format(root="/", point="/sys/fs/cgroup")
    assert system("0::/a\n", mount, {"/sys/fs/cgroup/a": v2("oops", "many")}) == []


def test_processes_of_one_group_agree_on_its_name(system, tmp_path):
    groups = {"/sys/fs/cgroup/a": v2(GIB), "/sys/fs/cgroup/b": v2(GIB)}
    system("0::/a\n", V2.format(root="/", point="/sys/fs/cgroup"), groups)
    first = memory_limits(tmp_path)[0].group
    assert memory_limits(tmp_path)[0].group == first
    (tmp_path / "proc/self/cgroup").write_text("0::/b\n")
    assert memory_limits(tmp_path)[0].group != first

"""Limits of control groups, in trees of files as kernels and container runtimes show them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.workers.cgroup import cpu_quota, memory_left

MIB = 1 << 20
GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712

V2 = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MEMORY = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:4 master:1 - cgroup cgroup rw,cpu,cpuacct"
OTHERS = """22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
"""


class Tree:
    """A root folder with what /proc tells of this process, and the groups' files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)

    def process(self, groups: str, *mounts: str, top: str = "/") -> None:
        (self.root / "proc/self/cgroup").write_text(groups)
        (self.root / "proc/self/mountinfo").write_text(OTHERS + "".join(f"{m.format(top=top)}\n" for m in mounts))

    def group(self, folder: str, **files: object) -> None:
        """Writes files; `__` in a name stands for the dot."""
        path = self.root / "sys/fs/cgroup" / folder
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def tree(home: Path) -> Tree:
    return Tree(home / "root")


# -- memory ---------------------------------------------------------------------------------------------------


def test_v2_leaves_the_limit_less_what_is_used(tree: Tree) -> None:
    tree.process("0::/job\n", V2)
    tree.group("job", memory__max=8 * GIB, memory__current=3 * GIB, memory__stat="anon 1\nfile 2")
    assert memory_left(tree.root) == 5 * GIB


@pytest.mark.parametrize("kind", ["inactive_file", "active_file", "slab_reclaimable"])
def test_cache_of_a_data_set_that_was_read_counts_as_free(tree: Tree, kind: str) -> None:
    tree.process("0::/\n", V2)
    stat = f"anon 100\nfile {7600 * MIB}\n{kind} {7600 * MIB}\ninactive_anon 55"
    tree.group("", memory__max=8192 * MIB, memory__current=8142 * MIB, memory__stat=stat)
    assert memory_left(tree.root) == (8192 - 8142 + 7600) * MIB


def test_shared_memory_does_not_count_as_free_although_it_is_cache(tree: Tree) -> None:
    tree.process("0::/\n", V2)
    stat = f"file {3 * GIB}\nshmem {3 * GIB}\ninactive_anon {3 * GIB}\ninactive_file 0\nactive_file 0"
    tree.group("", memory__max=4 * GIB, memory__current=3 * GIB, memory__stat=stat)
    assert memory_left(tree.root) == GIB


def test_v1_leaves_the_limit_less_what_is_used_with_the_descendants_cache_as_free(tree: Tree) -> None:
    tree.process("5:cpu,cpuacct:/\n4:memory:/job/inner\n1:name=systemd:/job\n", V1_MEMORY)
    stat = f"cache 7\ninactive_file 5\nactive_file 5\ntotal_inactive_file {2 * GIB}\ntotal_active_file {GIB}"
    tree.group("memory/job/inner", memory__limit_in_bytes=8 * GIB, memory__usage_in_bytes=6 * GIB, memory__stat=stat)
    tree.group("memory/job", memory__limit_in_bytes=V1_UNLIMITED, memory__usage_in_bytes=7 * GIB)
    tree.group("memory", memory__limit_in_bytes=V1_UNLIMITED, memory__usage_in_bytes=9 * GIB)
    assert memory_left(tree.root) == 5 * GIB


def test_hybrid_finds_the_limit_in_the_hierarchy_that_has_the_controller(tree: Tree) -> None:
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
    tree.process("4:memory:/job\n0::/session\n", V1_MEMORY, unified)
    tree.group("memory/job", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    tree.group("unified/session", cgroup__procs="1")
    assert memory_left(tree.root) == GIB


@pytest.mark.parametrize(("outer", "inner"), [(3, 2), (2, 3)])
def test_the_tightest_of_nested_limits_counts(tree: Tree, outer: int, inner: int) -> None:
    tree.process("0::/pod/box/leaf\n", V2)
    tree.group("pod", memory__max=outer * GIB, memory__current=0)
    tree.group("pod/box", memory__max="max", memory__current=0)
    tree.group("pod/box/leaf", memory__max=inner * GIB, memory__current=0)
    tree.group("pod/other", memory__max=1, memory__current=0)
    assert memory_left(tree.root) == 2 * GIB


def test_what_siblings_use_counts_at_the_ancestor_they_share(tree: Tree) -> None:
    tree.process("0::/pod/box\n", V2)
    tree.group("pod", memory__max=4 * GIB, memory__current=3 * GIB)
    tree.group("pod/box", memory__max=4 * GIB, memory__current=GIB)
    assert memory_left(tree.root) == GIB


def test_more_used_than_allowed_leaves_nothing(tree: Tree) -> None:
    tree.process("0::/\n", V2)
    tree.group("", memory__max=GIB, memory__current=GIB + 4096)
    assert memory_left(tree.root) == 0


def test_more_cache_than_use_leaves_no_more_than_the_limit(tree: Tree) -> None:
    tree.process("0::/\n", V2)
    tree.group("", memory__max=GIB, memory__current=MIB, memory__stat=f"inactive_file {2 * MIB}")
    assert memory_left(tree.root) == GIB


def test_a_limit_without_a_known_use_is_still_a_limit(tree: Tree) -> None:
    tree.process("0::/\n", V2)
    tree.group("", memory__max=GIB)
    assert memory_left(tree.root) == GIB


@pytest.mark.parametrize("limit", ["max", "", "lots", "-1", str(V1_UNLIMITED), "9223372036854710272"])
def test_what_is_no_limit_limits_nothing(tree: Tree, limit: str) -> None:
    tree.process("4:memory:/\n0::/\n", V2, V1_MEMORY)
    tree.group("", memory__max=limit, memory__current=GIB)
    tree.group("memory", memory__limit_in_bytes=limit, memory__usage_in_bytes=GIB)
    assert memory_left(tree.root) is None


def test_garbage_among_the_statistics_is_passed_over(tree: Tree) -> None:
    tree.process("0::/\n", V2)
    stat = f"inactive_file\n\nactive_file many\nslab_reclaimable -3\nx y z\ninactive_file {GIB}"
    tree.group("", memory__max=4 * GIB, memory__current=2 * GIB, memory__stat=stat)
    assert memory_left(tree.root) == 3 * GIB


# -- CPUs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("250000 100000", 2.5),
        ("10000 100000", 0.1),
        ("max 100000", None),
        ("250000", None),
        ("250000 0", None),
        ("1 2 3", None),
        ("nonsense", None),
        ("", None),
    ],
)
def test_v2_quota(tree: Tree, text: str, quota: float | None) -> None:
    tree.process("0::/job\n", V2)
    tree.group("job", cpu__max=text)
    assert cpu_quota(tree.root) == quota


@pytest.mark.parametrize(
    ("quota_us", "period_us", "quota"),
    [("150000", "100000", 1.5), ("-1", "100000", None), ("150000", "0", None), ("150000", "", None), ("x", "y", None)],
)
def test_v1_quota(tree: Tree, quota_us: str, period_us: str, quota: float | None) -> None:
    tree.process("4:memory:/\n3:cpu,cpuacct:/job\n", V1_CPU)
    tree.group("cpu,cpuacct/job", cpu__cfs_quota_us=quota_us, cpu__cfs_period_us=period_us)
    assert cpu_quota(tree.root) == quota


def test_the_smallest_quota_on_the_way_up_counts(tree: Tree) -> None:
    tree.process("0::/slice/job/step\n", V2)
    tree.group("slice", cpu__max="400000 100000")
    tree.group("slice/job", cpu__max="100000 50000")
    tree.group("slice/job/step", cpu__max="max 100000")
    tree.group("slice/neighbour", cpu__max="1000 100000")
    assert cpu_quota(tree.root) == 2.0


def test_another_controllers_hierarchy_is_not_asked(tree: Tree) -> None:
    cpuset = "31 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"
    tree.process("3:cpuset:/\n2:cpu,cpuacct:/\n", cpuset, V1_CPU)
    tree.group("cpuset", cpu__cfs_quota_us=1000, cpu__cfs_period_us=100000)
    tree.group("cpu,cpuacct", cpu__cfs_quota_us=200000, cpu__cfs_period_us=100000)
    assert cpu_quota(tree.root) == 2.0


def test_the_path_in_another_controllers_hierarchy_is_not_followed(tree: Tree) -> None:
    tree.process("3:cpuset:/b\n2:cpu,cpuacct:/a\n", V1_CPU)
    tree.group("cpu,cpuacct/a", cpu__cfs_quota_us=200000, cpu__cfs_period_us=100000)
    tree.group("cpu,cpuacct/b", cpu__cfs_quota_us=1000, cpu__cfs_period_us=100000)
    assert cpu_quota(tree.root) == 2.0


# -- where the groups are -------------------------------------------------------------------------------------


def both(tree: Tree, folder: str, quota: str = "200000 100000", limit: int = GIB) -> None:
    tree.group(folder, cpu__max=quota, memory__max=limit, memory__current=0)


def test_a_mounted_subtree_is_mapped_by_its_top(tree: Tree) -> None:
    """Docker with the host's namespace: the path is the host's, the mount shows the container's group."""
    tree.process("0::/docker/0a1b/inner\n", V2, top="/docker/0a1b")
    both(tree, "inner")
    both(tree, "docker/0a1b/inner", "1000 100000", 1)  # a group that the container made itself, of the same name
    assert (cpu_quota(tree.root), memory_left(tree.root)) == (2.0, GIB)


def test_a_path_that_does_not_exist_below_the_mount_falls_back_to_the_mount(tree: Tree) -> None:
    tree.process("0::/docker/0a1b\n", V2)
    both(tree, "")
    assert (cpu_quota(tree.root), memory_left(tree.root)) == (2.0, GIB)


@pytest.mark.parametrize(
    ("path", "top"),
    [("/", "/.."), ("/../other", "/"), ("/", "/../../elsewhere"), ("/a", "/b"), ("/kubepods", "/kubepods/pod1")],
)
def test_a_path_outside_what_is_mounted_falls_back_to_the_mount(tree: Tree, path: str, top: str) -> None:
    tree.process(f"0::{path}\n", V2, top=top)
    both(tree, "")
    both(tree, "../other", "1000 100000", 1)
    assert (cpu_quota(tree.root), memory_left(tree.root)) == (2.0, GIB)


def test_of_several_mounts_those_that_hold_the_group_count(tree: Tree) -> None:
    elsewhere = "50 23 0:26 /another /sys/fs/cgroup/elsewhere rw - cgroup2 cgroup2 rw"
    tree.process("0::/job\n", elsewhere, V2)
    both(tree, "elsewhere", "1000 100000", 1)
    both(tree, "job")
    assert (cpu_quota(tree.root), memory_left(tree.root)) == (2.0, GIB)


def test_blanks_and_colons_in_paths(tree: Tree) -> None:
    mount = r"30 23 0:26 /my\040slice /sys/fs/cgroup/the\040mount rw - cgroup2 cgroup2 rw"
    tree.process("0::/my slice/user:job\n", mount)
    both(tree, "the mount/user:job")
    assert (cpu_quota(tree.root), memory_left(tree.root)) == (2.0, GIB)


def test_paths_that_are_no_text_or_contain_unicodes_line_ends(tree: Tree) -> None:
    tree.process("", V2)
    (tree.root / "proc/self/cgroup").write_bytes(b"0::/\xff\xfe\xc2\x85\n")
    both(tree, "\udcff\udcfe\x85")
    assert (cpu_quota(tree.root), memory_left(tree.root)) == (2.0, GIB)


# -- nothing to be found --------------------------------------------------------------------------------------


def nothing_mounted(tree: Tree) -> None:
    tree.process("0::/job\n4:memory:/job\n")


def no_files(tree: Tree) -> None:
    tree.process("0::/job\n4:memory:/job\n3:cpu:/job\n", V2, V1_MEMORY, V1_CPU)


def no_groups(tree: Tree) -> None:
    tree.process("", V2)
    both(tree, "")


def garbage(tree: Tree) -> None:
    tree.process("\n:\n::\nfive\n0:memory\nx:memory:/\n0::relative\n", "- -", "1 2 3 - cgroup2", " - cgroup2 a b", V2)
    both(tree, "")


def folders_for_files(tree: Tree) -> None:
    tree.process("0::/\n", V2)
    for name in ("cpu.max", "memory.max", "memory.current", "memory.stat"):
        (tree.root / "sys/fs/cgroup" / name).mkdir(parents=True)


@pytest.mark.parametrize("build", [nothing_mounted, no_files, no_groups, garbage, folders_for_files, lambda tree: None])
def test_where_nothing_can_be_found_there_is_no_limit(tree: Tree, build: Callable[[Tree], None]) -> None:
    build(tree)
    assert (cpu_quota(tree.root), memory_left(tree.root)) == (None, None)


def test_this_machines_groups_can_be_read() -> None:
    left, quota = memory_left(), cpu_quota()
    assert left is None or left >= 0
    assert quota is None or quota > 0

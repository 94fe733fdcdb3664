"""ncu's output: what is kept of it, how it is shown, and the roofline drawn from it."""

import os
import stat
import sys
import types

import pytest
from click.testing import CliRunner

from qflash import machine
from qflash.cli import main
from qflash.cli.bench import load
from qflash.cli.profile import CUDA_KERNELS
from qflash.dispatch import KERNELS

profiles, profiled, roofline, report, store = (
    load(name) for name in ("profiles", "profiled", "roofline", "report", "rows")
)

_STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
HEADER = {
    "ID": ("", "0"),
    "Process ID": ("", "4711"),
    "Process Name": ("", "profile_fa"),
    "Host Name": ("", "secret.example.org"),
    "Kernel Name": ("", "qf_fa_kernel(QfAttnParams, qf::Grid)"),
    "Block Size": ("", "(128, 1, 1)"),
    "gpu__time_duration.sum": ("ns", "18,110,000"),
    "dram__bytes_read.sum": ("byte", "2,000,000,000"),
    "dram__bytes_write.sum": ("byte", "50,000,000"),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "71.25"),
    "launch__registers_per_thread": ("register/thread", "168"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": ("", "0"),
    "sm__ops_path_tensor_src_fp16_dst_fp32.sum": ("", "n/a"),
    _STALLED.format("short_scoreboard"): ("inst", "1.50"),
    _STALLED.format("barrier"): ("inst", "2.25"),
    _STALLED.format("selected"): ("inst", "1.00"),
    "an__uninteresting.sum": ("", "1"),
}


def raw(*launches: dict[str, str]) -> str:
    lines = [list(HEADER), [unit for unit, _ in HEADER.values()]]
    lines += [[launch.get(name, value) for name, (_, value) in HEADER.items()] for launch in launches]
    body = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    return f"==PROF== Connected to process 4711 (/home/someone/profile_fa)\n{body}\n"


def a_profile(**changes):
    facts = {"problem": profiles.describe(profiles.CASE), "gpu": "NVIDIA H200", "driver": "580", "commit": "abc"}
    return profiles.Profile(facts | {"ncu": "2025.3.0"}, profiles.parse_raw(raw(changes)))


def test_raw_output_is_cut_down_to_figures():
    (launch,) = a_profile().launches.items()
    assert launch[0] == "qf_fa_kernel"
    assert launch[1]["gpu__time_duration.sum"] == (18110000.0, "ns")
    assert launch[1][_STALLED.format("barrier")] == (2.25, "inst")
    assert not {"an__uninteresting.sum", "Host Name", "sm__ops_path_tensor_src_fp16_dst_fp32.sum"} & set(launch[1])


def test_several_launches_are_kept_apart_and_add_up():
    names = ("qf_unfused_scores_kernel", "void qf_unfused_softmax_kernel<float>(QfAttnParams)")
    found = profiles.parse_raw(raw(*({"Kernel Name": name} for name in names)))
    assert list(found) == ["qf_unfused_scores_kernel", "qf_unfused_softmax_kernel"]
    assert profiles.Profile({}, found).total(*profiles.DRAM) == 2 * 2.05e9


def test_files_come_back_and_name_nobody(tmp_path):
    profile = a_profile()
    profiles.write(tmp_path / "fa.csv", profile)
    assert profiles.read(tmp_path / "fa.csv") == profile
    details = "[4711] profile_fa@127.0.0.1\n  qf_fa_kernel (512, 1, 1)x(128, 1, 1), Context 1\n"
    details += "    /home/someone/x.cu\n    Duration  ms  18.11\n"
    text = profiles.text(profile, details)
    for secret in ("4711", "127.0.0.1", "secret", "/home"):
        assert secret not in text + (tmp_path / "fa.csv").read_text()
    assert "qf_fa_kernel (512, 1, 1)x(128, 1, 1)" in text
    assert "Duration  ms  18.11" in text


def test_figures_for_people():
    lines = dict(profiles.figures(a_profile()))
    assert lines["duration"] == "18.110 ms"
    assert lines["DRAM read"] == "2.00 GB"
    assert lines["SM throughput"] == "71.2 %"
    assert lines["registers per thread"] == "168"
    assert lines["shared loads, bank conflicts"] == "0"  # none is worth saying
    assert lines["warps wait for (cycles per issue)"] == "barrier 2.2, short scoreboard 1.5"
    assert "tensor pipe" not in lines


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "PROFILES", tmp_path / "profiles")
    monkeypatch.setattr(store, "RESULTS", tmp_path / "results")
    folder = tmp_path / "profiles" / "h200"
    folder.mkdir(parents=True)
    profiles.write(folder / "fa.csv", a_profile())
    return folder


def test_pages_show_the_profile(kept):
    table = report.profile_table("fa")
    assert "B=4 T=4096 H=16 D=128 full float16; NVIDIA H200, driver 580, ncu 2025.3.0; commit abc." in table
    assert "| duration | 18.110 ms |" in table
    assert "No profile is committed yet" in report.profile_table("unfused")


def test_roofline_points_come_from_rows_where_there_are_any(kept):
    flop = 4 * 4 * 16 * 4096 * 4096 * 128
    (point,) = roofline.points("h200")
    assert (point.kernel, point.timed, point.length) == ("fa", False, 4096)
    assert point.flop_per_byte == pytest.approx(flop / 2.05e9)
    assert point.tflops == pytest.approx(flop / 18.11e-3 / 1e12)
    row = store.problem(profiles.CASE, "forward") | {"kernel": "fa", "gpu": "NVIDIA H200", "gflops": 31e3}
    store.write(store.RESULTS / "nvidia-h200" / "ladder.jsonl", [row])
    (point,) = roofline.points("h200")
    assert (point.tflops, point.timed) == (31.0, True)


def test_roofline_lines_have_every_length_at_the_flop_per_byte_it_allows(kept):
    problem = store.problem(profiles.CASE, "forward") | {"kernel": "fa", "gpu": "NVIDIA H200"}
    rows = [problem | {"B": 16384 // t, "Tq": t, "Tk": t, "gflops": 1e3 * t} for t in (16384, 512)]
    rows += [
        problem | {"causal": True, "gflops": 7e3},
        problem | {"kernel": "fa_tc", "gpu": "NVIDIA T4", "gflops": 7e3},
    ]
    store.write(store.RESULTS / "nvidia-h200" / "ladder.jsonl", rows)
    lines = roofline.lines("h200")
    assert list(lines) == ["fa"]
    assert [(point.flop_per_byte, point.tflops, point.length) for point in lines["fa"]] == [
        (512 / 2, 512, 512),  # 4·B·H·T²·D FLOP over 4·B·H·T·D numbers of two bytes
        (16384 / 2, 16384, 16384),
    ]


def test_roofline_is_a_small_svg(kept):
    pytest.importorskip("matplotlib")
    path = roofline.draw("h200", kept / "roofline.svg")
    text = path.read_text()
    assert "<svg" in text
    assert "912 TFLOP/s" in text and "under ncu" in text
    assert len(text) < 300_000
    with pytest.raises(ValueError, match="no roofline for 't4'"):
        roofline.draw("t4", kept / "t4.svg")


def test_collecting_builds_checks_profiles_and_writes(tmp_path, monkeypatch):
    """With programs that play make, the binary and ncu."""
    calls = []

    def play(command):
        words = [str(word) for word in command]
        calls.append(words)
        if "--export" in words:
            open(words[words.index("--export") + 1], "w").close()
        answers = {"--query-metrics": "dram__bytes_read  Counter  byte\ngpu__time_duration  Counter  ns\n"}
        answers |= {"raw": raw({}), "details": "[1] x@host\nDuration", "--version": "Version 2025.3.0.0 (build 1)"}
        return next((answer for word, answer in answers.items() if word in words), "")

    monkeypatch.setattr(profiles, "run", play)
    monkeypatch.setattr(machine, "gpus", lambda: ((machine.Gpu("NVIDIA H200", 90, 1, "580"),), ""))
    profile = profiles.collect("fa", tmp_path / "out")
    assert calls[0] == ["make", "KERNEL=fa", "NVCC_ARCH=90", "HEAD_DIM=128", "DTYPE=float16"]
    assert calls[1][0].endswith("bin/profile_fa")
    collecting = next(words for words in calls if "--export" in words)
    assert collecting[collecting.index("--metrics") + 1] == "gpu__time_duration.sum,dram__bytes_read.sum"
    assert collecting[-len(calls[1]) :] == calls[1]
    assert profiles.read(tmp_path / "out" / "fa.csv") == profile
    assert profile.facts["ncu"] == "2025.3.0.0"
    assert "Duration" in (tmp_path / "out" / "fa.txt").read_text()


def test_every_operation_has_a_problem_to_profile(monkeypatch):
    ops = {kernel.op for kernel in KERNELS if kernel.device == "cuda"} - {"attention"}
    assert ops <= set(profiled.OPERATIONS)
    assert {profiled.operation_of(name) for name in CUDA_KERNELS} <= set(profiled.OPERATIONS)
    for kernel in ("decode", "sm90_decode"):  # whose binary would be asked for 4096 queries
        assert profiles.command_of(kernel, 90)[1] == [sys.executable, "-m", "bench.profiled", kernel]
    row = types.SimpleNamespace(op="softmax", source=None)
    monkeypatch.setitem(profiles.BY_NAME, "softmax", row)
    problem, command = profiles.command_of("softmax", 90)
    assert problem == "16384x8192 float16"
    assert command == [sys.executable, "-m", "bench.profiled", "softmax"]
    problem, command = profiles.command_of("sm90_int8_fp8", 90)  # its source is in the folder of another
    assert problem == profiles.describe(profiles.CASE) and command[1:] == ["-m", "bench.profiled", "sm90_int8_fp8"]


def test_profiling_without_a_gpu_or_of_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ((), "none today"))
    result = CliRunner().invoke(main, ["profile"])
    assert result.exit_code == 1
    assert "none today" in result.output
    result = CliRunner().invoke(main, ["profile", "--kernel", "cpu"])
    assert result.exit_code == 2
    assert "'cpu' is no CUDA kernel; allowed: " in result.output


@pytest.mark.parametrize(("capability", "counts"), [(90, True), (80, False), (120, False)])
def test_kernels_without_code_for_the_gpu_are_not_profiled(monkeypatch, capability, counts):
    seen = []
    monkeypatch.setattr(machine, "gpus", lambda: ((machine.Gpu("a GPU", capability, 141000, "580"),), ""))
    monkeypatch.setattr(profiles, "collect", lambda name, folder, ncu: seen.append(name) or a_profile())
    result = CliRunner().invoke(main, ["profile", "--ncu", "true"])
    assert result.exit_code == 0, result.output
    assert ("sm90_fwd" in seen) == counts and "fa_mma" in seen


def test_a_failing_command_is_told(tmp_path):
    tool = tmp_path / "ncu"
    tool.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM'\nexit 1\n")
    os.chmod(tool, stat.S_IRWXU)
    with pytest.raises(profiles.ProfileError, match="ERR_NVGPUCTRPERM"):
        profiles.run([tool, "--version"])
    with pytest.raises(profiles.ProfileError, match="does not run"):
        profiles.run([tmp_path / "missing"])


@pytest.mark.process
def test_what_is_profiled_has_line_numbers():
    code = "import os; print(os.environ['QFLASH_LINEINFO'])"
    assert profiles.run([sys.executable, "-c", code]) == "1\n"

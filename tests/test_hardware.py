"""Plausible figures and clear errors. How fast the machine is, is nothing to assert."""

import dataclasses
import math

import pytest
import torch

from nanoteach import hardware
from nanoteach.hardware import HARDWARE, hardware_named, measure

CPU = torch.device("cpu")


def test_the_h200_has_the_measured_figures():
    h200 = hardware_named("h200")
    assert (h200.name, h200.flops) == ("H200", 786e12)
    assert (h200.read_bandwidth, h200.copy_bandwidth) == (4311e9, 4198e9)
    assert h200.source.startswith("measured 2026-11-29")


@pytest.mark.parametrize("name", HARDWARE)
def test_named_hardware_says_where_its_figures_come_from(name):
    machine = HARDWARE[name]
    assert machine.source.startswith(("measured", "NVIDIA"))
    assert "bf16" in machine.source
    # Between an L4 and the fastest GPU there is. A slip of a factor of a thousand lies outside.
    assert 50e12 < machine.flops < 5e15
    assert 200e9 < machine.copy_bandwidth <= machine.read_bandwidth < 20e12
    assert hardware_named(name.upper()) is machine


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="'h300'.*h200, h100, a100"):
        hardware_named("h300")


def test_hardware_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        hardware_named("h200").flops = 1.0


@pytest.fixture(scope="module")
def measured():
    """This CPU, and the lines that the measurement said."""
    lines = []
    return measure("cpu", torch.float32, progress=lines.append), lines


def test_measure_on_this_cpu(measured):
    machine, lines = measured
    # From a slow laptop to a large server, and beyond on both sides.
    assert 1e8 < machine.flops < 1e15
    assert 1e8 < machine.read_bandwidth < 1e13
    assert 1e8 < machine.copy_bandwidth < 1e13
    assert [line.partition(" ")[0].strip(":") for line in lines] == ["GEMM", "read", "copy"]
    assert machine.name.startswith("CPU")
    assert "float32" in machine.source and torch.__version__ in machine.source


def test_bandwidths_come_out_alike_twice(measured):
    machine, _ = measured
    # Very loose: a busy machine halves a figure. What this catches is a unit or a cache.
    assert 1 / 20 < hardware.measure_read(CPU) / machine.read_bandwidth < 20
    assert 1 / 20 < hardware.measure_copy(CPU) / machine.copy_bandwidth < 20


@pytest.mark.parametrize("device", ["xpu", "meta", "gpu"])
def test_a_device_that_cannot_be_measured(device):
    with pytest.raises(ValueError, match=f"'{device}'.*cpu, cuda and mps"):
        measure(device)


def test_seconds_per_call_is_a_median_after_a_warm_up(monkeypatch):
    # A clock that we move by hand. The warm-up takes 100 s, then calls take 3, 1 and 2 s.
    time_now = [0.0]
    durations = iter([100.0, 3.0, 1.0, 2.0])

    def call():
        time_now[0] += next(durations)

    monkeypatch.setattr(hardware.time, "perf_counter", lambda: time_now[0])
    assert hardware.seconds_per_call(call, CPU, budget=0) == 2.0
    assert next(durations, None) is None


def test_bytes_and_flops_are_counted_right(monkeypatch):
    # If a call took a second, the rate would be the count itself.
    monkeypatch.setattr(hardware, "seconds_per_call", lambda call, device, budget=0.8: 1.0)
    assert hardware.measure_gemm(CPU, torch.float32) == 2 * 256**3
    assert hardware.measure_read(CPU) == 256 * 2**20
    assert hardware.measure_copy(CPU) == 2 * 256 * 2**20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_measure_on_a_gpu():
    machine = measure("cuda", torch.bfloat16)
    assert machine.name == torch.cuda.get_device_name()
    for value in (machine.flops, machine.read_bandwidth, machine.copy_bandwidth):
        assert math.isfinite(value)
    # Slower than that, the array came over PCIe; a wait that is missing shows as far too fast.
    assert 50e9 < machine.read_bandwidth < 20e12
    assert 50e9 < machine.copy_bandwidth < 20e12

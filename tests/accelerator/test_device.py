"""The device: right values, memory that is not the host's, no result before a wait."""

from __future__ import annotations

import copy
import gc
import io
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from tests.accelerator.ranks import device_ranks, own_device
from torch import nn

pytestmark = device_ranks(1, timeout=100)


def convolutional():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 4, 3),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    return net.double(), torch.randn(4, 3, 12, 12, dtype=torch.float64)


def transformer():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    net = nn.Sequential(layer, nn.LayerNorm(16))
    return net.double(), torch.randn(3, 7, 16, dtype=torch.float64)


def embedding():
    return nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4)).double(), torch.randint(0, 10, (5,))


@pytest.mark.parametrize("make", [convolutional, transformer, embedding])
def test_training_gives_the_numbers_of_the_cpu(make, schedule):
    net, x = make()
    twin = copy.deepcopy(net).to("sim")
    for model, data in ((net, x), (twin, x.to("sim"))):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(net.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs.cpu())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_nets_have_derivatives(kind):
    net = kind(4, 8, 2)
    twin, x = copy.deepcopy(net).to("sim"), torch.randn(5, 2, 4)
    net(x)[0].sum().backward()
    twin(x.to("sim"))[0].sum().backward()
    torch.testing.assert_close(net.weight_ih_l0.grad, twin.weight_ih_l0.grad.cpu())


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss])
def test_losses_have_the_values_and_derivatives_of_the_cpu(loss):
    x, y = torch.randn(2, 4, 4).unbind()
    ours, plain = x.to("sim").requires_grad_(), x.clone().requires_grad_()
    value, expected = loss(ours, y.to("sim")), loss(plain, y)
    value.backward()
    expected.backward()
    torch.testing.assert_close(value.cpu(), expected)
    torch.testing.assert_close(ours.grad.cpu(), plain.grad)


# -- memory --------------------------------------------------------------------------------------


def test_uninitialised_memory_is_nan():
    assert torch.empty(3, device="sim").isnan().all().item()


def test_memory_used_on_another_stream_needs_record_stream():
    import simdev

    side = simdev.Stream()

    def product(record):
        x = torch.ones(256, device="sim")
        with simdev.patience(side_streams_s=1.0):
            side.wait_stream(simdev.current_stream())
            with simdev.stream(side):
                y = x * 2
            if record:
                x.record_stream(side)
            del x
            torch.full((256,), 5.0, device="sim").sum().item()  # gets the memory of x, if it may
            simdev.current_stream().wait_stream(side)
            return y[0].item()

    assert product(record=True) == 2
    assert product(record=False) == 10


def test_memory_is_counted_by_the_functions_of_torch_accelerator():
    memory = torch.accelerator.memory
    gc.collect()
    memory.empty_cache()
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    x = torch.ones(1 << 20, device="sim")
    assert memory.memory_allocated() == before + (4 << 20)
    del x
    assert memory.memory_allocated() == before
    assert memory.max_memory_allocated() == before + (4 << 20)
    assert memory.memory_reserved() >= before + (4 << 20)
    memory.empty_cache()
    assert memory.memory_reserved() < before + (4 << 20)
    free, total = memory.get_memory_info()
    assert total == 16 << 30
    assert free == total - memory.memory_reserved()


def test_devices_do_not_mix():
    a, b = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1")
    for other in (b, torch.ones(3)):
        with pytest.raises(RuntimeError, match="same device"):
            a + other
    assert (a + b.to(a.device)).tolist() == [2.0] * 3


# -- streams, events, copies ---------------------------------------------------------------------


def test_work_of_another_stream_is_not_there_before_it_is_waited_for():
    import simdev

    side, x = simdev.Stream(), torch.zeros(4, device="sim")
    simdev.synchronize()
    with simdev.patience(side_streams_s=1.0):
        with simdev.stream(side):
            x.add_(1)
        assert x.tolist() == [0.0] * 4
        simdev.current_stream().wait_stream(side)
        assert x.tolist() == [1.0] * 4


def test_events_order_streams_and_tell_time():
    import simdev

    first, last = simdev.Event(enable_timing=True), simdev.Event(enable_timing=True)
    with simdev.patience(default_stream_s=5.0):
        first.record()
        simdev._C.put_sleep(0.05)
        last.record()
        assert not last.query()
        last.synchronize()
        assert last.query()
        assert 45 < first.elapsed_time(last) < 5000


def test_pinned_copies_do_not_wait():
    import simdev

    host = torch.ones(4).pin_memory()
    with simdev.patience(default_stream_s=5.0):
        x = host.to("sim", non_blocking=True)
        host.fill_(7)  # too early
        assert x.tolist() == [7.0] * 4
        y = (x * 3).to("cpu", non_blocking=True)
        assert y.is_pinned()
        assert y.tolist() != [21.0] * 4
        simdev.synchronize()
        assert y.tolist() == [21.0] * 4


def test_backward_follows_the_streams_of_forward(schedule):
    import simdev

    w, x = torch.randn(4, 4, device="sim", requires_grad=True), torch.randn(4, 4, device="sim")
    side = simdev.Stream()
    side.wait_stream(simdev.current_stream())
    with simdev.stream(side):
        loss = (x @ w).square().sum()
    simdev.current_stream().wait_stream(side)
    loss.backward()
    twin = w.detach().cpu().requires_grad_()
    (x.cpu() @ twin).square().sum().backward()
    torch.testing.assert_close(w.grad.cpu(), twin.grad)


def test_the_schedule_of_the_test_is_that_of_its_ranks(schedule):
    import simdev

    own_device()
    expected_s = {"prompt": (0, 0), "late_kernels": (0.05, 0), "late_collectives": (0, 0.05)}
    assert simdev._C.patience() == expected_s.get(schedule, (0.05, 0.05))


def test_a_kernel_that_fails_is_reported_by_the_next_wait():
    table = nn.Embedding(3, 2).to("sim")
    rows = table(torch.tensor([7], device="sim"))
    with pytest.raises(RuntimeError, match="index out of range"):
        rows.cpu()


# -- counters ------------------------------------------------------------------------------------


def test_host_synchronisations_are_counted_by_cause():
    import simdev

    x = torch.arange(4.0, device="sim")
    with simdev.counters() as counted:
        (x * 2 + 1).sqrt().softmax(0)
        assert counted.syncs == {}
        torch.nonzero(x)
        assert counted.syncs == {"aten::nonzero": 1}
        counted.reset()
        x.sum().item()
        x.cpu()
        torch.ones(3).to("sim")
        torch.accelerator.synchronize()
        torch.accelerator.current_stream().synchronize()
        torch.accelerator.current_stream().record_event().synchronize()
        x.to("cpu", non_blocking=True)
    x.tolist()  # no longer counted
    assert counted.syncs == {
        "item": 1,
        "copy to host": 1,
        "copy from host": 1,
        "device.synchronize": 1,
        "stream.synchronize": 1,
        "event.synchronize": 1,
    }


def test_bytes_between_host_and_device_are_counted_pinned_and_pageable_apart():
    import simdev

    pageable, pinned = torch.ones(100), torch.ones(10).pin_memory()
    with simdev.counters() as counted:
        x = pageable.to("sim")
        pinned.to("sim", non_blocking=True)
        (x + x).sum()
        x.to("cpu", non_blocking=True)  # torch pins what it makes for this
        torch.empty(100).copy_(x)
        x[0].item()
    assert counted.bytes == {
        "to device, pageable": 400,
        "to device, pinned": 40,
        "to host, pinned": 400,
        "to host, pageable": 404,
    }


# -- generators, precision, files ----------------------------------------------------------------


def test_the_generator_moves_on_the_host():
    import simdev

    state = simdev.get_rng_state()
    a = torch.randn(5, device="sim")
    simdev.set_rng_state(state)
    assert len(state) == 16
    assert torch.equal(a, torch.randn(5, device="sim"))
    before = torch.get_rng_state()
    F.dropout(a, 0.5)
    assert torch.equal(before, torch.get_rng_state()), "that of the CPU stays"
    torch.manual_seed(3)
    assert simdev.initial_seed() == 3


def test_autocast_and_the_scaler_of_gradients():
    net, x = nn.Linear(4, 4).to("sim"), torch.randn(2, 4, device="sim")
    scaler = torch.amp.GradScaler("sim", init_scale=8.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with torch.autocast("sim", dtype=torch.float16):
        y = net(x)
        assert y.dtype == torch.float16
        assert F.softmax(y, -1).dtype == torch.float32
    scaler.scale(y.float().sum()).backward()
    before = net.bias.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(net.bias.detach(), before - 0.2)


def test_files_remember_the_device():
    net, file = nn.Linear(3, 3).to("sim"), io.BytesIO()
    torch.save(net.state_dict(), file)
    for where, kind in ((None, "sim"), ("cpu", "cpu"), ("sim:1", "sim")):
        file.seek(0)
        weight = torch.load(file, map_location=where)["weight"]
        assert weight.device.type == kind
        torch.testing.assert_close(weight.cpu(), net.weight.detach().cpu())


# -- devices and processes -----------------------------------------------------------------------


def test_torch_accelerator_is_this_device():
    accelerator = torch.accelerator
    assert accelerator.is_available()
    assert accelerator.current_accelerator() == torch.device("sim")
    assert accelerator.device_count() == 2
    accelerator.set_device_index(1)
    assert torch.ones(2, device="sim").device == torch.device("sim", 1)
    with accelerator.device_index(0):
        assert accelerator.current_device_index() == 0
    assert accelerator.current_device_index() == 1
    side = torch.Stream("sim")
    with side:
        assert accelerator.current_stream() == side
    accelerator.set_device_index(0)
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        accelerator.set_device_index(2)


def test_a_process_forked_after_first_use_cannot_use_the_device():
    torch.ones(2, device="sim")
    child = os.fork()
    if child == 0:
        try:
            torch.ones(2, device="sim")
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(0)
    assert os.waitpid(child, 0)[1] >> 8 == 7


def script(text, device_path, **variables):
    environ = {**os.environ, "PYTHONPATH": str(device_path), **variables}
    words = [sys.executable, "-c", text]
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=90)


def test_host_code_that_reads_the_memory_is_stopped_with_a_sentence(device_path):
    text = "import torch, ctypes; ctypes.string_at(torch.ones(4, device='sim:1').data_ptr(), 4)"
    done = script(text, device_path)
    assert done.returncode == -11
    assert "host code touched the memory of device 1" in done.stderr


def test_variables_choose_the_number_of_devices_and_their_memory(device_path):
    text = """
import torch
print(torch.accelerator.device_count(), torch.accelerator.memory.get_memory_info())
a = [torch.empty(4 << 20, dtype=torch.uint8, device="sim") for _ in range(2)]
b = torch.empty(6 << 20, dtype=torch.uint8, device="sim")
try:
    torch.empty(4 << 20, dtype=torch.uint8, device="sim")
except torch.OutOfMemoryError as error:
    print(error)
a.clear()
torch.empty(8 << 20, dtype=torch.uint8, device="sim")
"""
    done = script(text, device_path, SIM_DEVICES="1", SIM_MEMORY_MB="16")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"1 {(16 << 20, 16 << 20)}"
    assert f"Tried to allocate {4 << 20} bytes" in second


def test_without_devices_there_is_no_accelerator(device_path):
    text = "import torch; print(torch.accelerator.is_available(), torch.accelerator.device_count())"
    done = script(text, device_path, SIM_DEVICES="0")
    assert done.stdout == "False 0\n", done.stderr

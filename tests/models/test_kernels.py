"""The Triton kernels in Triton's interpreter, which runs them on a CPU, and its compiler, which makes code for a card.

The interpreter has only the bits of a bfloat16, so products are of float32 there, of the same values.  What only a card
shows is not verified here: the speed, and what comes of programs that run side by side.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from breeze_rtc.models.attention import BlockConfig, RopeConfig
from breeze_rtc.models.depth import DepthConfig, DepthDecoder, DepthWay
from breeze_rtc.models.presets import breeze_tts_2, tiny
from breeze_rtc.models.quantised import narrow, quantise
from breeze_rtc.models.sampling import Sampling, choose, gumbel
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.runtime import frame_graphs
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.runtime.frame_steps import Batch, BatchRow, batch_of, depth_frame, guided
from breeze_rtc.runtime.graphs import Function, Outputs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

# The published heads and positions, and those of Qwen3-TTS, in small widths; a head that no power of two is.
BREEZE = DepthConfig(
    codebooks=16,
    vocab=51,
    embedding=64,
    block=BlockConfig(hidden=48, heads=8, kv_heads=2, head_dim=128, ffn=72, eps=1e-5),
    layers=1,
    rope=breeze_tts_2().depth.rope,
)
QWEN = DepthConfig(
    codebooks=4,
    vocab=33,
    embedding=40,
    block=BlockConfig(hidden=40, heads=16, kv_heads=8, head_dim=128, ffn=56, qk_norm=True),
    layers=1,
    rope=RopeConfig(theta=1e6),
    projection="biased",
)
ODD = DepthConfig(
    codebooks=4,
    vocab=35,
    embedding=24,
    block=BlockConfig(hidden=24, heads=6, kv_heads=2, head_dim=12, ffn=200),
    layers=2,
    rope=RopeConfig(theta=1e4),
    projection="none",
)
SHAPES = {"tiny": tiny().depth, "breeze": BREEZE, "qwen": QWEN, "odd": ODD}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def fused_depth() -> Iterator[ModuleType]:
    """The module over interpreted kernels; nobody else in this process gets those.

    Triton decides when it is imported whether its own functions are interpreted, and `torch.compile` may have done so.
    """
    before = _without_triton()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield coarse(importlib.import_module("breeze_rtc.models.fused_depth"))
    # Kept for the interpreter's end to take apart, or the library complains of what still holds it.
    sys.modules.update({f"interpreted {name}": module for name, module in _without_triton().items()})
    sys.modules.update(before)


def _without_triton() -> dict[str, ModuleType]:
    """Forget Triton and what is made with it, but for its library, which bears being loaded once; what was there."""
    ours = ("breeze_rtc.models.kernels", "breeze_rtc.models.fused_depth")
    names = [
        name
        for name in sys.modules
        if name in ours or (name.split(".")[0] == "triton" and not name.startswith("triton._C"))
    ]
    return {name: sys.modules.pop(name) for name in names}


def coarse(fused_depth: ModuleType) -> ModuleType:
    """With larger tiles than a card's, for a program takes the interpreter 5 ms; and sums that are shared out."""
    kernels = fused_depth.kernels
    kernels.PLAIN, kernels.GATED, kernels.HEAD = (kernels.Tile(n, 64) for n in (256, 128, 64))
    kernels.LONG, kernels.LONG_INPUTS = kernels.Tile(64, 64, splits=2), 100
    return fused_depth


@pytest.fixture(scope="module")
def kernels(fused_depth: ModuleType) -> Any:
    return fused_depth.kernels


def decoder(config: DepthConfig, dtype: torch.dtype = torch.float32) -> DepthDecoder:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        depth = DepthDecoder(config)
        for name, parameter in depth.named_parameters():
            if "norm" in name:
                # Gains of one would hide that they are not used.
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    depth = depth.to(dtype).eval()
    depth.heads.data = depth.heads.data.float()
    return depth


@torch.inference_mode()
def frame(
    way: Callable[..., Tensor], config: DepthConfig, dtype: torch.dtype, rows: int, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The likeliest codes of the first `rows` of some rows, or those that are forced, and their logits: (rows, K) and
    (K - 1, rows, vocab)."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(32, config.embedding, generator=generator)[:rows].to(dtype)
    first = torch.randint(0, config.vocab, (32,), generator=generator)[:rows]
    logits = []

    def pick(codebook: int, found: Tensor) -> Tensor:
        logits.append(found)
        return found.argmax(-1) if forced is None else forced[:, codebook]

    return way(hidden, first, pick), torch.stack(logits)


@pytest.mark.parametrize("name", SHAPES)
def test_a_frame_is_that_of_the_eager_stack(fused_depth: ModuleType, name: str) -> None:
    """In float32: codes equal, logits to the last digits."""
    config = SHAPES[name]
    depth = decoder(config)
    codes, logits = frame(depth.generate, config, torch.float32, 2)
    found, found_logits = frame(fused_depth.FusedDepth(depth).generate, config, torch.float32, 2)
    assert torch.equal(found, codes)
    torch.testing.assert_close(found_logits, logits, rtol=1e-4, atol=2e-5)


def test_a_row_is_the_same_whatever_rows_come_with_it(fused_depth: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, in tiles that it fills and does not; and all are those of the eager stack."""
    monkeypatch.setattr(fused_depth.kernels, "GATED", fused_depth.kernels.Tile(32, 16))
    config = replace(tiny().depth, codebooks=3, layers=1)
    depth = decoder(config)
    codes, logits = frame(depth.generate, config, torch.float32, 17)
    fused = fused_depth.FusedDepth(depth)
    most, most_logits = frame(fused.generate, config, torch.float32, 17)
    assert torch.equal(most, codes)
    torch.testing.assert_close(most_logits, logits, rtol=1e-4, atol=2e-5)
    for rows in (1, 2, 3, 8, 16):
        found, found_logits = frame(fused.generate, config, torch.float32, rows)
        assert torch.equal(found, codes[:rows])
        assert torch.equal(found_logits, most_logits[:, :rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_is_as_near_as_the_check_asks(fused_depth: ModuleType, dtype: torch.dtype) -> None:
    """And not farther from what float32 says of the same weights than the eager stack is: it rounds less often."""
    depth = decoder(ODD, dtype)
    fused = fused_depth.FusedDepth(depth)
    fused.check()
    codes, exact = frame(decoder(ODD, dtype).float().generate, ODD, torch.float32, 4)
    errors = []
    for way in (fused.generate, depth.generate):
        _, logits = frame(way, ODD, dtype, 4, codes)
        errors.append(float((logits - exact).square().mean()))
    assert errors[0] < errors[1] * 1.05


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_weights_are_multiplied_as_they_are_kept(
    fused_depth: ModuleType, kernels: Any, kind: str, dtype: torch.dtype
) -> None:
    model = torch.nn.Module()
    model.depth = decoder(ODD, dtype)
    narrow(model, kind)
    fused_depth.FusedDepth(model.depth).check()
    generator = torch.Generator().manual_seed(1)
    for rows, outputs, inputs in ((1, 24, 200), (17, 40, 90)):
        q, scale = quantise(torch.randn(outputs, inputs, generator=generator).to(dtype), kind)
        x = torch.randn(rows, 1, inputs, generator=generator).to(dtype)
        expected = x.double() @ (q.double() * scale.double()[:, None]).T
        out = kernels.linear(x, q, scale)
        assert out.shape == expected.shape
        assert out.dtype == dtype
        error = float((out.double() - expected).abs().max() / expected.abs().max())
        # Where a card rounds to bfloat16, the interpreter cuts off.
        assert error < (1e-5 if dtype == torch.float32 else 2**-7)
        assert torch.equal(kernels.linear(x[:1], q, scale), out[:1])


def test_what_stands_before_and_behind_a_product(kernels: Any) -> None:
    """Norm, gate, residual and transposed weights, with sums shared out over programs and without."""
    generator = torch.Generator().manual_seed(1)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, gain, weight, beside = some(5, 300), some(300), some(44, 300), some(5, 44)
    normed = F.rms_norm(x, (300,), gain, 1e-3)
    close = torch.testing.assert_close
    close(kernels.linear(x, weight, gain=gain, eps=1e-3), normed @ weight.T, rtol=1e-4, atol=1e-4)
    close(kernels.linear(x, weight, beside=beside), x @ weight.T + beside, rtol=1e-4, atol=1e-4)
    close(kernels.linear(x, weight.T.contiguous(), is_transposed=True), x @ weight.T, rtol=1e-4, atol=1e-4)
    gate, up = (normed @ weight.T).chunk(2, -1)
    gated = kernels.linear(x, weight, gain=gain, eps=1e-3, is_gated=True)
    close(gated, F.silu(gate) * up, rtol=1e-3, atol=1e-3)
    for splits in (2, 3):
        tile = replace(kernels.PLAIN, inputs=64, splits=splits)
        assert kernels.linear(x, weight, tile=tile).shape == (5, 44)
        close(kernels.linear(x, weight, tile=tile), x @ weight.T, rtol=1e-4, atol=1e-4)
        out = beside.clone()
        close(kernels.linear(x, weight, out=out, beside=out, tile=tile), x @ weight.T + beside, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("guides", [0, 1, 2])
@pytest.mark.parametrize("draws", [False, True])
def test_a_draw_takes_the_code_that_torch_takes(kernels: Any, guides: int, draws: bool) -> None:
    """Greedy rows and drawn ones, limits of their own, ties at the limit, guidance for some, ids that are silent; and
    a logit that is no number shows."""
    V, R, silent = 45, 24, (40, 43, 42)
    generator = torch.Generator().manual_seed(guides)
    logits = torch.randn((1 + guides) * R, V, generator=generator).mul(4).round().div(2)
    samplings = [
        Sampling(
            depth_temperature=0.0 if row % 5 == 0 or not draws else 0.3 + row / 10,
            top_k=(3, 1, 0, 17, 44)[row % 5],
            cfg_scale=1.0 if row % 3 == 0 or not guides else 2.5,
            reference_scale=1.5 if row % 4 == 0 and guides == 2 else 0.0,
        )
        for row in range(R)
    ]
    rows = [BatchRow(0, row, 7, s, (s.cfg_scale, s.reference_scale)) for row, s in enumerate(samplings)]
    ints, floats, kind = batch_of(rows, V, depth=True)
    kind = replace(kind, guides=guides)
    batch = Batch(ints, floats)
    values = batch.sampling(kind)
    assert kind.draws == draws
    noise = gumbel(batch.seeds, batch.frames, torch.arange(1, 4), V)[:, 1] if draws else None

    def drawn(logits: Tensor, largest: Tensor) -> Tensor:
        return kernels.choose(
            logits,
            noise,
            values,
            guides=guides,
            scale=batch.scale,
            other_scale=batch.other_scale,
            largest=largest,
            silent=silent,
        )

    together = guided(torch.split(logits, R), batch) if guides else logits.clone()
    most = together.amax(-1)
    together[:, 40:42] = together[:, 43] = float("-inf")
    largest = torch.full((R,), 0.5)
    found = drawn(logits, largest)
    assert torch.equal(found, choose(together, noise, values))
    torch.testing.assert_close(largest, most + 0.5)
    assert len(set(found.tolist())) > 5
    for bad in (float("nan"), float("inf")):
        logits[3, 44] = bad
        largest = torch.zeros(R)
        assert (drawn(logits, largest) < V).all()
        assert largest.isfinite().tolist() == [row != 3 for row in range(R)]


FAULTS = {
    "the other rotation": ("low * cos - high * sin", "low * cos + high * sin"),
    "no gain": ("a = wide * tl.load(gain", "a = wide + 0 * tl.load(gain"),
    "mean of another length": ("square / inputs", "square / (inputs + 1)"),
    "a key one place off": ("* ROOM + place + one", "* ROOM + start + one"),
    "the newest not seen": ("p <= place", "p < place + (place == 0)"),
    "heads of another group": ("query = (group * GROUPS + h[:, None])", "query = (h[:, None] * KV_HEADS + group)"),
    "no residual": ("beside=x", "beside=None"),
    "gate and twin exchanged": ("total * _sigmoid(total) * other", "other * _sigmoid(other) * total"),
    "a part left out": ("tl.static_range(SPLITS)", "tl.static_range(SPLITS - 1)"),
    "the weights of the layer before": ("enumerate(self._blocks)", "enumerate(self._blocks[:1] * 2)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found_before_the_kernels_are_used(
    fused_depth: ModuleType, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check that stands before a card's first use of them finds each."""
    wrong, right = FAULTS[fault][1], FAULTS[fault][0]
    found = 0
    for name in ("kernels", "fused_depth"):
        source = Path(fused_depth.__file__).with_name(f"{name}.py").read_text()
        found += right in source
        source = source.replace(right, wrong).replace("breeze_rtc.models import kernels", "faulty import kernels")
        (tmp_path / f"{name}.py").write_text(source)
    assert found == 1
    package = ModuleType("faulty")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "faulty", package)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.import_module("faulty.fused_depth")
    try:
        with pytest.raises(ArithmeticError, match="deviations from the eager ones"):
            coarse(module).FusedDepth(decoder(ODD)).check()
    finally:
        for name in ("faulty.kernels", "faulty.fused_depth"):
            sys.modules.pop(name, None)


class PlainRecorder:
    """Records nothing and runs the function again: a stand-in for a card whose graphs may hold what was compiled."""

    compiles = True

    def record(self, function: Function, buffers: tuple[Tensor, ...]) -> Callable[[], Outputs]:
        return lambda: function(*buffers)

    def pool_bytes(self) -> int:
        return 0


@pytest.mark.usefixtures("fused_depth")
@pytest.mark.parametrize("guides", [0, 1, 2])
def test_a_whole_depth_step_is_the_same_fused(guides: int) -> None:
    """Codes in slot and ring, guidance and draws included, of streams of all kinds."""
    model = SpeechModel.load("tiny")
    executor = Executor(model, max_streams=4, kv_pages=8)
    state = executor.state
    rows = [
        BatchRow(row, 11 + row, 3, Sampling(depth_temperature=0.9 * (row > 0), top_k=9), (2.0, 1.5 * (guides == 2)))
        for row in range(2)
    ]
    rows[1] = replace(rows[1], scales=(1.0, 0.0))
    ints, floats, kind = batch_of(rows, model.config.depth.vocab, depth=True)
    kind = replace(kind, guides=guides)
    found = []
    with torch.inference_mode():
        for way in (None, model.depth.way("fused")):
            state.hidden.copy_(torch.randn(state.hidden.shape, generator=torch.Generator().manual_seed(2)))
            state.codes[:, 0] = torch.arange(5)
            state.ring.zero_()
            largest = depth_frame(model, state, Batch(ints, floats), kind, way)
            assert largest.isfinite().all()
            found.append((state.codes.clone(), state.ring.clone()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][1].any()


@pytest.mark.parametrize("fastest", ["eager", "fused"])
def test_the_graphs_run_what_is_fastest_here(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way that works is timed in a graph of the largest shape; one that fails is left out, and said."""
    model = SpeechModel.load("tiny")
    ways: dict[str, DepthWay] = {}
    used: list[str] = []

    def way(self: DepthDecoder, name: str) -> DepthWay:
        if name == "compiled":
            raise RuntimeError("no compiler")

        def generate(*args: Any) -> Tensor:
            used.append(name)
            return self.generate(*args)

        ways[name] = DepthWay(generate)
        return ways[name]

    monkeypatch.setattr(DepthDecoder, "way", way)
    monkeypatch.setattr(frame_graphs, "STAGES", ("depth",))
    executor = Executor(model, max_streams=2, kv_pages=8)
    real = frame_graphs.FrameGraphs._replay_ns

    def timed(self: frame_graphs.FrameGraphs, key: frame_graphs.Key) -> int:
        real(self, key)
        return 1 if used[-1] == fastest else 2

    monkeypatch.setattr(frame_graphs.FrameGraphs, "_replay_ns", timed)
    executor.record_graphs(PlainRecorder())
    assert executor.graphs is not None
    assert set(used) == {"eager", "fused"}
    used.clear()
    with torch.inference_mode():
        for graph in executor.graphs.table.graphs.values():
            graph._replay()
    assert set(used) == {fastest}


COMPILE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from breeze_rtc.models import kernels
from breeze_rtc.models.depth import DepthDecoder
from breeze_rtc.models.fused_depth import FusedDepth
from breeze_rtc.models.presets import breeze_tts_2
from breeze_rtc.models.quantised import narrow
from breeze_rtc.models.sampling import RowSampling

class Card:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", int(sys.argv[1]), 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Card())
run, made = JITFunction.run, {}

def compiled_only(self, *args, warmup, **options):
    kernel = run(self, *args, warmup=True, **options)
    made.setdefault(self.fn.__name__, set()).add(kernel.asm["ptx"])
    assert kernel.metadata.shared < 227 << 10 and len(kernel.asm["cubin"]) > 1000
    return kernel

JITFunction.run = compiled_only
torch.set_default_device("meta")
config = breeze_tts_2().depth
with torch.inference_mode():
    for kind in ("", "int8", "fp8"):
        model = torch.nn.Module()
        model.depth = DepthDecoder(config).bfloat16().to("meta")
        model.depth.heads.data = model.depth.heads.data.float()
        if kind:
            narrow(model, kind)
        for rows in (16,) if kind else (1, 16):
            hidden = torch.empty(rows, config.embedding, dtype=torch.bfloat16)
            blank = torch.zeros(rows, dtype=torch.int64)
            FusedDepth(model.depth).generate(hidden, blank, lambda codebook, logits: blank)
    one = torch.ones(16, 1)
    for is_greedy, guides in ((True, 0), (False, 0), (False, 2)):
        values = RowSampling(one, one, one.long(), one, is_greedy, 0 if is_greedy else 50, False)
        logits = torch.empty(16 * (1 + guides), config.vocab)
        noise = None if is_greedy else torch.empty(16, 15, config.vocab)[:, 3]
        kernels.choose(logits, noise, values, guides=guides, scale=one, other_scale=one, largest=one[:, 0])
for name, texts in sorted(made.items()):
    print(name, len(texts), any("cp.async" in t for t in texts), any("mma.sync" in t for t in texts))
"""


def test_a_frame_of_the_published_size_is_compiled_for_hopper() -> None:
    """All kernels of a frame, with the types and alignments that they are given on a card; products by tensor cores,
    their weights copied ahead."""
    compiles = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE, "90"], env=compiles, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    said = {name: tuple(rest) for name, *rest in map(str.split, answer.stdout.splitlines())}
    assert said.keys() == {"_product", "_add_up", "_attend", "_choose"}
    assert said["_product"][1:] == ("True", "True")
    assert int(said["_product"][0]) > 10

"""What distillation does on GPUs; every test is skipped where there are fewer than it needs."""

import gc
import json
import sys

import pytest
import torch
from bounds import assert_rounded, rounding
from comparing import TERMS, share
from conftest import assert_equal_weights, build_model, build_tokenizer, tiny_model
from test_gpu import TORCHRUN, needs, run_script

from common.base.devices import GIB
from common.distill import distillation
from common.distill.teachers import LocalTeacher
from common.maths import divergences
from common.model import head, logprobs, models
from common.planning import layouts, plan
from common.training import optim
from common.training.offload import Offloader

pytestmark = pytest.mark.gpu
FP32 = dict(dtype="fp32", steps=4, compile=False)


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    return torch.device("cuda", 0)


def problem(cuda, dtype, N=700, V=5003, H=64, Ht=96):
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, H, device=cuda) / 2, torch.randn(V, H, device=cuda) / 2
    states, teacher = torch.randn(N, Ht, device=cuda) / 2, torch.randn(V, Ht, device=cuda) / 2
    ids, weights = torch.randint(V, (N,), device=cuda), torch.rand(N, device=cuda) / N
    hidden, weight, states, teacher = (x.to(dtype) for x in (hidden, weight, states, teacher))
    return hidden.requires_grad_(), weight.requires_grad_(), states, teacher, ids, weights


@needs(1)
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_chunks_have_the_gradients_of_the_dense_form(cuda, monkeypatch, dtype, beta, compile):
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(head, "CHUNK_TOKENS", 256)
    hidden, weight, states, teacher, ids, weights = problem(cuda, dtype)
    dense = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits, teacher_logits = dense[0] @ dense[1].t(), states.double() @ teacher.double().t()
    logp, logq = (teacher_logits / 0.7).log_softmax(-1), (logits / 0.7).log_softmax(-1)
    top, top_ids = logp.topk(50)
    tail, token = divergences.tail_logp(logp, top_ids), logp.gather(-1, ids[:, None]).squeeze(-1)
    said = top_ids.int(), top.float(), tail.float(), token.float()
    logq_A = torch.cat([logq.gather(-1, top_ids), divergences.tail_logp(logq, top_ids)[:, None]], -1)
    cases = [
        (distillation.Full((teacher, None, None), len(weight), beta, 0.7, compile), (states,), (logp, logq)),
        (distillation.TopK(beta, 0.7, compile), said, (torch.cat([top, tail[:, None]], -1), logq_A)),
    ]
    # both softmaxes sum over the vocabulary, logits over the width, results over the tokens; in half precision the
    # derivatives of the logits are rounded, and the result (fp16 comes near its smallest numbers: no better than bf16)
    sums = rounding(2 * len(weight) + hidden.shape[1] + states.shape[1] + len(hidden))
    bound = sums if dtype == torch.float32 else rounding(2, dtype=torch.bfloat16)
    for target, inputs, pair in cases:
        args = hidden, weight, None, weights, None, len(weight), target, ids, *inputs
        loss = distillation._TokenLoss.apply(*args)[0]
        expected = (divergences.terms(*pair, beta)[0] * weights).sum()
        assert loss.item() == pytest.approx(expected.item(), rel=sums)
        found = torch.autograd.grad(loss.sum() * 3, (hidden, weight))
        truth = torch.autograd.grad(expected * 3, dense, retain_graph=True)
        for own, true in zip(found, truth, strict=True):
            error = (own.double() - true).norm() / true.norm()
            assert own.dtype == dtype and error < bound, error


@needs(1)
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cross_entropy_in_chunks_is_that_of_whole_logits(cuda, monkeypatch, dtype, compile):
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(head, "CHUNK_TOKENS", 256)
    hidden, weight, _, _, ids, weights = problem(cuda, dtype)
    weights[100:300] = 0  # not learned
    dense = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    target = distillation.Tokens(compile)
    loss, values = distillation._TokenLoss.apply(hidden, weight, None, weights, None, len(weight), target, ids)
    nll = torch.nn.functional.cross_entropy(dense[0] @ dense[1].t(), ids, reduction="none")
    expected = (nll * weights).sum()
    # as above; the loss itself is computed in fp32 from rounded factors
    sums = rounding(2 * len(weight) + hidden.shape[1] + len(hidden))
    bound = sums if dtype == torch.float32 else rounding(2, dtype=torch.bfloat16)
    assert loss.item() == pytest.approx(expected.item(), rel=sums)
    assert_rounded(values[0], nll, 2 * len(weight) + hidden.shape[1], magnitude=nll.max().item(), dtype=torch.float32)
    found = torch.autograd.grad(loss.sum() * 3, (hidden, weight))
    truth = torch.autograd.grad(expected * 3, dense)
    for own, true in zip(found, truth, strict=True):
        error = (own.double() - true).norm() / true.norm()
        assert own.dtype == dtype and error < bound, error


@needs(1)
@pytest.mark.parametrize("compile", [False, True])
def test_peak_memory_is_three_chunks_of_logits(cuda, compile):
    torch.compiler.reset()  # code that was compiled for the shapes of other tests is general, and takes more
    V, H, N = 50_000, 64, 4096
    hidden, weight, states, teacher, ids, weights = problem(cuda, torch.bfloat16, N, V, H)
    target = distillation.Full((teacher, None, None), V, 0.5, 1.0, compile)
    args = hidden, weight, None, weights, None, V, target, ids, states

    def peak() -> float:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = distillation._TokenLoss.apply(*args)[0]
        loss.sum().backward()
        torch.cuda.synchronize()
        hidden.grad = weight.grad = None
        return torch.cuda.max_memory_allocated() - before

    peak()
    chunk, results = head.CHUNK_TOKENS * V * 4, 4 * (V * H + N * H)
    assert peak() <= 3 * chunk + 2 * results + 20 * 2**20
    assert N >= 4 * head.CHUNK_TOKENS  # dense logits would be 8 chunks, and their copies more


@needs(1)
@pytest.mark.parametrize("frozen", [True, False])
def test_offloading_frees_what_it_says(model_folders, cuda, frozen):
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).to(cuda, torch.bfloat16)
    model.requires_grad_(not frozen)
    before, memory = {k: v.clone() for k, v in model.state_dict().items()}, Offloader(model)
    for _ in range(3):
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated()
        freed = memory.offload()
        assert freed * GIB == allocated - torch.cuda.memory_allocated() > 8 * 2048 * 2048 * 2
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        memory.onload()
        assert torch.cuda.memory_allocated() == allocated
        assert_equal_weights(model.state_dict(), before)
    if not frozen:
        optimizer = optim.AdamW(model, 1e-3)
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated()
        assert optimizer.offload() * GIB == pytest.approx(allocated - torch.cuda.memory_allocated(), rel=0.01)

    # a teacher's body leaves and its head stays
    teacher = LocalTeacher(str(model_folders["teacher"]), [cuda], "bf16", temperature=1.0, compile=False)
    output = teacher.model.get_output_embeddings().weight
    size = sum(p.numel() for p in teacher.model.parameters()) - output.numel()
    assert teacher.offload() * GIB >= 2 * size and output.is_cuda
    assert teacher.head.on(cuda)[0].data_ptr() == output.data_ptr()
    teacher.onload()
    assert {p.device for p in teacher.model.parameters()} == {cuda}


@pytest.fixture(scope="module")
def one_gpu(launcher, tmp_path_factory):
    return run_script(launcher, [sys.executable], launcher.copy("gkd"), tmp_path_factory.mktemp("one") / "run", **FP32)


def assert_alike(run, other) -> None:
    """The same up to rounding; layouts log different things, but these all do."""
    assert len(run.steps) == len(other.steps) == 4
    for own, theirs in zip(run.steps, other.steps, strict=True):
        for name in ("divergence", "grad_norm", "teacher_logps", "entropy"):
            assert own[name] == pytest.approx(theirs[name], rel=4 * share()), name


@needs(1)
def test_a_run_on_a_gpu_is_that_on_the_cpu_and_offloading_changes_nothing(launcher, one_gpu, tmp_path):
    assert_alike(one_gpu, launcher.trained("gkd", steps=4))
    options = dict(param_offload=True, optimizer_offload="rollout", **FP32)
    run = run_script(launcher, [sys.executable], launcher.copy("gkd"), tmp_path / "run", **options)
    assert_alike(run, one_gpu)
    size = sum(p.numel() for p in build_model("qwen2").parameters()) * 4 / GIB
    assert all(line["offloaded_gib_student"] >= size for line in run.steps)


@needs(1)
@pytest.mark.parametrize("loss", ["reverse_kl", "opd"])
def test_bf16_and_compiled_by_default(launcher, tmp_path, loss):
    options = dict(dtype="auto", loss=loss)
    for steps in (2, 4):
        run = run_script(launcher, [sys.executable], launcher.copy("gkd"), tmp_path / "run", steps=steps, **options)
    assert [line["step"] for line in run.steps] == [1, 2, 3, 4]
    assert {weight.dtype for weight in run.weights().values()} == {torch.bfloat16}


@needs(1)
def test_fine_tuning_on_a_gpu_is_that_on_the_cpu_and_fits_its_plan(launcher, tmp_path, chats_file):
    data = dict(train_data=chats_file, eval_data=chats_file, micro_batch_tokens=100)
    run = run_script(launcher, [sys.executable], launcher.copy("sft"), tmp_path / "fp32", **FP32, **data)
    for own, other in zip(run.steps, launcher.trained("sft", steps=4, **data).steps, strict=True):
        for name in ("nll", "entropy", "grad_norm"):
            assert own[name] == pytest.approx(other[name], rel=4 * share()), name
    tiny_model("qwen2", vocab_size=20_000, hidden_size=512, intermediate_size=2048, num_hidden_layers=4,
               num_attention_heads=8, initializer_range=0.02).save_pretrained(tmp_path / "model")  # fmt: skip
    build_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"messages": [{"role": role, "content": " ".join([str(i)] * 100)} for role in ("user", "assistant") * 3]}
            for i in range(32)]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = dict(policy_model=tmp_path / "model", train_data=tmp_path / "rows.jsonl", batch_size=32, eval_data="",
                   max_tokens=640, max_prompt_tokens=320, micro_batch_tokens=32 * 640, compile=True)  # fmt: skip
    script = launcher.copy("sft")
    run = run_script(launcher, [sys.executable], script, tmp_path / "run", dtype="auto", steps=3, **options)
    argv = launcher.options(script, tmp_path / "run", device="cuda", dtype="auto", **options)
    module, cfg = layouts.load(script, argv)
    planned = plan.of(cfg, layouts.all_ranks(module, cfg, 1)).peak(0) / GIB
    assert all(0 < line["memory_gib"][0] < planned for line in run.steps), (planned, run.steps)


@needs(2)
@pytest.mark.parametrize(("script", "command", "constants"), [
    ("gkd_multigpu", [sys.executable], dict(STUDENT_GPU_IDS=(0, 1))),
    ("gkd_multigpu", [sys.executable], dict(ROLLOUT_GPU_IDS=(1,))),
    ("gkd_multigpu", [sys.executable], dict(STUDENT_GPU_IDS=(1,), TEACHER_GPU_IDS=(0, 1))),
    ("gkd_ddp", TORCHRUN, {}),
])  # fmt: skip
def test_layouts_of_two_gpus_are_one_gpu(launcher, one_gpu, tmp_path, script, command, constants):
    copy = launcher.copy(script, **constants)
    assert_alike(run_script(launcher, command, copy, tmp_path / "run", **FP32), one_gpu)


@needs(2)
def test_a_teacher_spread_over_two_gpus_says_the_same(tmp_path):
    tiny_model("qwen2", num_hidden_layers=8).save_pretrained(tmp_path)  # two layers could lie on one GPU
    folder, gpus = str(tmp_path), [torch.device("cuda", i) for i in range(2)]
    spread, whole = models.load_spread(folder, gpus, "fp32"), models.load_frozen(folder, gpus[0], "fp32")
    ids = torch.arange(4, 20, device=gpus[0])[None]
    assert len(set(spread.hf_device_map.values())) == 2
    mask = torch.ones_like(ids, dtype=torch.bool)
    args = ids[:, :6], mask[:, :6], ids[:, 6:], mask[:, 6:]
    for wrapper in (distillation.HiddenStates, logprobs.LogProbs):
        one, two = (wrapper(model, 1.0)(*args)[0].to(gpus[0]) for model in (whole, spread))
        assert_rounded(one, two, TERMS)
        assert two.abs().mean() > 0.1

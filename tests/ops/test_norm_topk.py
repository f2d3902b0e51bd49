import numpy as np
import pytest
import torch

from tests.ops.cases import DTYPES, ROUNDING, assert_close, float64, gradients, random_tensor
from tests.oracles import ops as oracle

pytestmark = pytest.mark.covering

# tokens, width, experts, rank, k
SHAPES = [
    (9, 8, 4, 4, 2),
    (1, 1, 1, 1, 1),
    (13, 7, 5, 3, 5),
    (6, 5, 37, 17, 8),
    (0, 4, 3, 2, 2),
    (33, 31, 8, 40, 1),
    (3, 4, 64, 256, 8),
    (2, 4, 300, 2, 20),
]


def setting(shape: tuple[int, ...], dtype: torch.dtype, device: str):
    tokens, width, experts, rank, _ = shape
    x = random_tensor(tokens, width, dtype=dtype, device=device, seed=0)
    w = random_tensor(experts, width, rank, dtype=dtype, device=device, seed=1)
    dnorms = random_tensor(
        tokens,
        experts,
        dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        device=device,
        seed=2,
    )
    return x.requires_grad_(), w.requires_grad_(), dnorms


def assert_ranked(experts: torch.Tensor, exact: np.ndarray, dtype: torch.dtype) -> None:
    """Equal to the top k of the exact norms, except pairs that are closer than the rounding."""
    wanted = oracle.topk(exact, experts.size(1))
    margin = 2 * ROUNDING[dtype] * exact.max(initial=0.0)
    for t, chosen in enumerate(experts.tolist()):
        assert len(set(chosen)) == len(chosen)
        difference = np.abs(exact[t][chosen] - exact[t][wanted[t]])
        assert difference.max() <= margin, f"token {t}: {chosen}, not {wanted[t]}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lower_index(ops, device, dtype):
    x = torch.tensor([[1.0], [2.0]], dtype=dtype, device=device)
    w = torch.tensor([3.0, 4.0, 3.0, 4.0, 0.0], dtype=dtype, device=device).view(5, 1, 1)
    _, experts, _ = ops.norm_topk(x, w, 5)
    assert experts.tolist() == [[1, 3, 0, 2, 4]] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_zero_norm_has_no_gradient(ops, device, dtype):
    x, w, dnorms = setting((9, 8, 4, 4, 2), dtype, device)
    with torch.no_grad():
        w[2] = 0
        x[5] = 0
    norms, experts, _ = ops.norm_topk(x, w, 2)
    assert experts[5].tolist() == [0, 1]
    assert norms[5].tolist() == [0.0] * 4
    dx, dw = gradients(norms, dnorms, x, w)
    assert (dw[2] == 0).all() and (dx[5] == 0).all()
    wanted = oracle.norms_gradient(float64(dnorms), float64(x), float64(w))
    assert_close(dx, wanted[0], dtype)
    assert_close(dw, wanted[1], dtype)


def test_not_a_number_ranks_first_and_stays_visible(ops, device):
    x = torch.tensor([[1.0, 0.0]], device=device)
    w = torch.ones(4, 2, 1, device=device)
    w[2] = torch.nan
    norms, experts, _ = ops.norm_topk(x, w, 3)
    assert experts.tolist() == [[2, 0, 1]]
    assert norms.isnan().tolist() == [[False, False, True, False]]


def test_threads_do_not_change_a_bit(native, two_threads):
    """With one column in x a product has one term, so the BLAS cannot change an order."""
    x, w, _ = setting((500, 1, 8, 200, 2), torch.float32, "cpu")
    of_two = native.norm_topk(x, w, 2)
    torch.set_num_threads(1)
    of_one = native.norm_topk(x, w, 2)
    assert torch.equal(of_two[0], of_one[0]) and torch.equal(of_two[1], of_one[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_tiles_equal_one_product(reference, native, device, dtype):
    """64 k columns: the native version processes the tokens in several tiles."""
    tokens = 1100 if device == "cuda" else 300  # a tile is larger there
    x, w, dnorms = setting((tokens, 3, 16, 4096, 2), dtype, device)
    norms, experts, _ = native.norm_topk(x, w, 2)
    exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x, w))
    exact_norms, *_ = reference.norm_topk(exact_x, exact_w, 2)
    assert_close(norms, float64(exact_norms), dtype)
    assert_ranked(experts, float64(exact_norms), dtype)
    wanted = gradients(exact_norms, dnorms.double(), exact_x, exact_w)
    for actual, exact in zip(gradients(norms, dnorms, x, w), wanted, strict=True):
        assert_close(actual, float64(exact), dtype)


@pytest.mark.parametrize("keep", ["nothing", "chosen", "all"])
@pytest.mark.parametrize("tokens, experts, rank, k", [(1, 2, 32, 1), (150, 9, 96, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_and_choices(native, device, dtype, tokens, experts, rank, k, keep):
    """In sizes for which a kernel on Hopper sums the squares of C within its product."""
    x = random_tensor(tokens, 72, dtype=dtype, device=device, seed=0).requires_grad_()
    w = random_tensor(experts, 72, rank, dtype=dtype, device=device, seed=1).requires_grad_()
    norms, chosen, c = native.norm_topk(x, w, k, keep=keep)
    exact_c = torch.einsum("td,edr->ter", x.double(), w.double())
    exact = exact_c.norm(dim=-1)
    assert_close(norms, float64(exact), dtype)
    assert torch.equal(chosen, norms.topk(k).indices)
    if c is not None:
        of_chosen = exact_c.gather(1, chosen[:, :, None].expand(-1, -1, rank))
        assert_close(c, float64(of_chosen), dtype)
    dnorms = random_tensor(tokens, experts, dtype=torch.float32, device=device, seed=2)
    for found, wanted in zip(
        gradients(norms, dnorms, x, w), gradients(exact, dnorms.double(), x, w), strict=True
    ):
        assert_close(found, float64(wanted), dtype)


def test_the_gradient_of_w_is_rounded_to_bf16_once(native, device):
    """Its sum over nine tiles of tokens (on a GPU three) stays in fp32. All terms have one sign, so
    the rounding of C's gradient in bf16 averages out."""
    x, w, dnorms = setting((2200, 3, 16, 4096, 1), torch.bfloat16, device)
    x, w, dnorms = (t.detach().abs() for t in (x, w, dnorms))
    x_TD, exact = float64(x), np.empty(w.shape)
    for e, w_DR in enumerate(float64(w)):  # the oracle's loop over tokens takes half a minute
        c_TR = x_TD @ w_DR
        exact[e] = x_TD.T @ (c_TR / np.linalg.norm(c_TR, axis=1)[:, None] * float64(dnorms)[:, [e]])
    x.requires_grad_(), w.requires_grad_()
    _, dw = gradients(native.norm_topk(x, w, 1)[0], dnorms, x, w)
    error = np.abs(float64(dw) - exact) / exact
    assert error.max() < 1.1 * torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_ranks_and_does_nothing_else(ops, device, dtype):
    x, w, dnorms = setting((9, 8, 4, 4, 2), dtype, device)
    exact = oracle.norms(float64(x), float64(w))
    bias = torch.tensor([0.0, 3.0, -3.0, 0.5], device=device) * float(exact.mean())
    norms, experts, _ = ops.norm_topk(x, w, 2, bias)
    assert_close(norms, exact, dtype)
    assert_ranked(experts, exact + float64(bias), dtype)
    assert (experts[:, 0] == 1).all()
    dx, dw = gradients(norms, dnorms, x, w)
    wanted = oracle.norms_gradient(float64(dnorms), float64(x), float64(w))
    assert_close(dx, wanted[0], dtype)
    assert_close(dw, wanted[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keep", ["nothing", "chosen", "all"])
@pytest.mark.parametrize("gradient", ["all", "chosen"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_c_and_both_gradients(ops, device, shape, gradient, keep, dtype):
    """dC of a chosen expert is the gradient of C plus the norm's part; of others the latter."""
    x, w, dnorms = setting(shape, dtype, device)
    scores = ops.norm_topk(x, w, shape[-1], keep=keep, gradient=gradient)
    exact = oracle.norms(float64(x), float64(w))
    assert scores.norms_TE.dtype == dnorms.dtype and scores.experts_TK.dtype == torch.int64
    assert_close(scores.norms_TE, exact, dtype)
    assert_ranked(scores.experts_TK, exact, dtype)
    assert_c_and_gradients(scores, x, w, dnorms, gradient, keep)


def assert_c_and_gradients(scores, x, w, dnorms, gradient, keep) -> None:
    of_x, of_w, of_norms = float64(x), float64(w), float64(dnorms)
    experts = scores.experts_TK.cpu().numpy()
    if gradient == "chosen":
        chosen = (experts[:, :, None] == np.arange(len(of_w))).any(1)
        of_norms = of_norms * chosen
    dx, dw = oracle.norms_gradient(of_norms, of_x, of_w)
    outputs, upstream = [scores.norms_TE], [dnorms]
    if keep == "nothing":
        assert scores.c_TKR is None
    else:
        c = np.einsum("td,tkdr->tkr", of_x, of_w[experts]) * (experts >= 0)[:, :, None]
        assert_close(scores.c_TKR, c, x.dtype)
        dc = random_tensor(*c.shape, dtype=x.dtype, device=x.device, seed=3)
        outputs, upstream = [*outputs, scores.c_TKR], [*upstream, dc]
        for t, j in zip(*np.nonzero(experts >= 0), strict=True):
            e, of_c = experts[t, j], float64(dc)[t, j]
            dx[t] += of_w[e] @ of_c
            dw[e] += np.outer(of_x[t], of_c)
    found = torch.autograd.grad(outputs, (x, w), upstream)
    assert_close(found[0], dx, x.dtype)
    assert_close(found[1], dw, x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keep", ["nothing", "chosen", "all"])
@pytest.mark.parametrize(
    ("gradient", "max_rows"), [("all", None), ("chosen", None), ("chosen", 52)]
)
def test_another_rule_chooses(ops, device, gradient, max_rows, keep, dtype):
    """The norms above the mean of the batch: none for some tokens, several for others, by index."""
    x, w, dnorms = setting((9, 8, 6, 4, 0), dtype, device)
    seen = []

    def above_the_mean(norms_TE: torch.Tensor) -> torch.Tensor:
        seen.append((norms_TE, norms_TE.requires_grad or torch.is_grad_enabled()))
        experts_TE = torch.arange(6, device=device).expand(norms_TE.shape)
        return experts_TE.masked_fill(norms_TE <= norms_TE.mean(), -1)

    scores = ops.norm_topk(
        x, w, None, keep=keep, gradient=gradient, chosen=above_the_mean, max_rows=max_rows
    )
    ((norms_TE, has_gradient),) = seen
    assert torch.equal(norms_TE, scores.norms_TE) and not has_gradient
    assert torch.equal(scores.experts_TK, above_the_mean(norms_TE))
    assert_close(scores.norms_TE, oracle.norms(float64(x), float64(w)), dtype)
    assert 0 < (scores.experts_TK < 0).sum() < scores.experts_TK.numel()
    assert_c_and_gradients(scores, x, w, dnorms, gradient, keep)


@pytest.mark.parametrize("gradient", ["all", "chosen"])
def test_what_is_saved(native, gradient):
    """C of all experts; with the gradient "chosen", C of the chosen experts, if it is kept."""
    x, w, _ = setting((9, 8, 5, 4, 2), torch.float32, "cpu")
    sizes = {}
    for keep in ("nothing", "chosen", "all"):
        seen: dict[int, int] = {}

        def note(tensor: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            seen[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            native.norm_topk(x, w, 2, keep=keep, gradient=gradient)
        for given in (x, w):
            seen.pop(given.data_ptr(), None)
        sizes[keep] = sum(seen.values())
    norms_and_experts = 4 * 9 * 5 + 8 * 9 * 2
    of_all, of_chosen = 4 * 9 * 5 * 4, 4 * 9 * 2 * 4
    assert sizes["nothing"] == norms_and_experts
    if gradient == "chosen":
        assert sizes["chosen"] == sizes["all"] == norms_and_experts + of_chosen
    else:
        assert sizes["chosen"] == norms_and_experts  # the layer saves the C that it receives
        assert sizes["all"] == norms_and_experts + of_all

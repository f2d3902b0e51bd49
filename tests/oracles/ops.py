"""The operators as loops over numbers, in numpy's float64. They are written from the definitions
alone and share nothing with moe_parallel. Gradients are formulas, not automatic."""

import numpy as np


def routing_map(experts, num_experts, pad_rows_per_expert=None):
    """slots (one per row), rows (one per choice) and counts, expert by expert."""
    tokens, choices = experts.shape
    slots, counts = [], []
    rows = np.full((tokens, choices), -1, dtype=np.int64)
    for expert in range(num_experts):
        before = len(slots)
        for t in range(tokens):
            for k in range(choices):
                if experts[t, k] == expert:
                    rows[t, k] = len(slots)
                    slots.append(t * choices + k)
        if pad_rows_per_expert is not None:
            slots.extend([-1] * (before + pad_rows_per_expert - len(slots)))
        counts.append(len(slots) - before)
    return np.array(slots, dtype=np.int64), rows, np.array(counts, dtype=np.int64)


def rms_norm(x, weight, eps):
    y = np.zeros(x.shape)
    for n, row in enumerate(x):
        y[n] = weight * row / np.sqrt(np.mean(row**2) + eps)
    return y


def rms_norm_gradient(dy, x, weight, eps):
    """By the matrix of a row's derivatives: dz_i/dx_j = r (i == j) - r^3 x_i x_j / D."""
    dx, dweight = np.zeros(x.shape), np.zeros(weight.shape)
    width = len(weight)
    for n, row in enumerate(x):
        r = 1 / np.sqrt(np.mean(row**2) + eps)
        derivatives = r * np.eye(width) - r**3 * np.outer(row, row) / width
        dx[n] = (dy[n] * weight) @ derivatives
        dweight += dy[n] * row * r
    return dx, dweight


def softmax(logits):
    """Of each row, without the shift by the largest logit."""
    p = np.zeros(logits.shape)
    for n, row in enumerate(logits):
        exponentials = [np.exp(logit) for logit in row]
        p[n] = np.array(exponentials) / sum(exponentials)
    return p


def permute(x, slots, choices):
    y = np.zeros((len(slots), x.shape[1]))
    for n, slot in enumerate(slots):
        if slot >= 0:
            y[n] = x[slot // choices]
    return y


def permute_gradient(dy, slots, choices, tokens):
    dx = np.zeros((tokens, dy.shape[1]))
    for n, slot in enumerate(slots):
        if slot >= 0:
            dx[slot // choices] += dy[n]
    return dx


def unpermute(y, slots, probs):
    tokens, choices = probs.shape
    out = np.zeros((tokens, y.shape[1]))
    for n, slot in enumerate(slots):
        if slot >= 0:
            out[slot // choices] += probs[slot // choices, slot % choices] * y[n]
    return out


def unpermute_gradient(dout, y, slots, probs):
    dy, dprobs = np.zeros(y.shape), np.zeros(probs.shape)
    choices = probs.shape[1]
    for n, slot in enumerate(slots):
        if slot >= 0:
            t, k = slot // choices, slot % choices
            dy[n] = probs[t, k] * dout[t]
            dprobs[t, k] = sum(y[n] * dout[t])
    return dy, dprobs


def expert_of_rows(counts):
    return [expert for expert, count in enumerate(counts) for _ in range(count)]


def grouped_gemm(x, w, counts):
    y = np.zeros((len(x), w.shape[2]))
    for n, expert in enumerate(expert_of_rows(counts)):
        for i in range(w.shape[1]):
            y[n] += x[n, i] * w[expert, i]
    return y


def grouped_gemm_gradient(dy, x, w, counts):
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    for n, expert in enumerate(expert_of_rows(counts)):
        for i in range(w.shape[1]):
            dx[n, i] = sum(dy[n] * w[expert, i])
            dw[expert, i] += x[n, i] * dy[n]
    return dx, dw


def norms(x, w):
    p = np.zeros((len(x), len(w)))
    for t in range(len(x)):
        for expert in range(len(w)):
            p[t, expert] = sum(c * c for c in x[t] @ w[expert]) ** 0.5
    return p


def topk(p, k):
    """Indices by decreasing value; ties go to the lower index."""
    return np.array(
        [sorted(range(len(row)), key=lambda i: (-row[i], i))[:k] for row in p], dtype=np.int64
    ).reshape(len(p), k)


def norms_gradient(dp, x, w):
    """dp/dC = C / p, and dC = x W."""
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    p = norms(x, w)
    for t in range(len(x)):
        for expert in range(len(w)):
            if p[t, expert] > 0:
                dc = dp[t, expert] / p[t, expert] * (x[t] @ w[expert])
                dx[t] += w[expert] @ dc
                dw[expert] += np.outer(x[t], dc)
    return dx, dw


def swiglu(gate, up, probs):
    """probs * gate * sigmoid(gate) * up, elementwise."""
    h = np.zeros(gate.shape)
    for n, i in np.ndindex(*gate.shape):
        h[n, i] = probs[n] * gate[n, i] * _sigmoid(gate[n, i]) * up[n, i]
    return h


def swiglu_gradient(dh, gate, up, probs):
    dgate, dup, dprobs = np.zeros(gate.shape), np.zeros(gate.shape), np.zeros(len(gate))
    for n, i in np.ndindex(*gate.shape):
        g, s = gate[n, i], _sigmoid(gate[n, i])
        dgate[n, i] = dh[n, i] * probs[n] * up[n, i] * (s + g * s * (1 - s))
        dup[n, i] = dh[n, i] * probs[n] * g * s
        dprobs[n] += dh[n, i] * g * s * up[n, i]
    return dgate, dup, dprobs


def _sigmoid(x):
    return 1 / (1 + np.exp(-x)) if x > 0 else np.exp(x) / (1 + np.exp(x))


def expert_merge(weights, w):
    merged = np.zeros((len(weights), *w.shape[1:]))
    for p, e in np.ndindex(*weights.shape):
        merged[p] += weights[p, e] * w[e]
    return merged


def expert_merge_gradient(dmerged, weights, w):
    dweights, dw = np.zeros(weights.shape), np.zeros(w.shape)
    for p, e in np.ndindex(*weights.shape):
        dweights[p, e] = (dmerged[p] * w[e]).sum()
        dw[e] += weights[p, e] * dmerged[p]
    return dweights, dw


def sum_of_experts(x, experts, probs, expert):
    """y[t] = sum over the choices of probs * expert(e, t, k), without the empty slots."""
    y = np.zeros(x.shape)
    for t, k in np.ndindex(*experts.shape):
        if experts[t, k] >= 0:
            y[t] += probs[t, k] * expert(experts[t, k], t, k)
    return y


def turned(x, angles):
    """Each pair as a complex number, times e^(i angle)."""
    half = x.shape[-1] // 2
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles[..., :half])
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def attention(q, k, v, scale):
    """Causal, one head at a time: q [S, B, H, C], k and v [S, B, G, C] -> [S, B, H, C]."""
    out = np.zeros(q.shape)
    for b, h in np.ndindex(q.shape[1:3]):
        g = h // (q.shape[2] // k.shape[2])
        out[:, b, h] = _attention_weights(q[:, b, h], k[:, b, g], scale) @ v[:, b, g]
    return out


def attention_gradient(dout, q, k, v, scale):
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    for b, h in np.ndindex(q.shape[1:3]):
        g = h // (q.shape[2] // k.shape[2])
        weights = _attention_weights(q[:, b, h], k[:, b, g], scale)
        dweights = dout[:, b, h] @ v[:, b, g].T
        dscores = weights * (dweights - (weights * dweights).sum(1, keepdims=True))
        dq[:, b, h] = scale * dscores @ k[:, b, g]
        dk[:, b, g] += scale * dscores.T @ q[:, b, h]
        dv[:, b, g] += weights.T @ dout[:, b, h]
    return dq, dk, dv


def _attention_weights(q, k, scale):
    scores = np.where(np.tril(np.ones((len(q), len(k)), dtype=bool)), scale * q @ k.T, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True, initial=-np.inf))
    return weights / weights.sum(1, keepdims=True)

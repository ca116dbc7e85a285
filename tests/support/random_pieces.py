"""The pieces that random modules are made of: lines of `__init__`, and lines of `forward` that make `{y}` of `{x}`.

    "linear"    self.{m} = nn.Linear({w}, {w})    {y} = self.{m}({x})

Each takes a matrix of `{n}` rows and `{w}` columns and makes another such; `{h}` and `{q}` are a half and a quarter of
the columns.  `{z}` is any earlier such value.  A piece stands in one of the groups below, from which modules draw evenly.
"""

from __future__ import annotations

LAYERS = {
    "linear": ("self.{m} = nn.Linear({w}, {w})", "{y} = self.{m}({x})"),
    "no_bias": ("self.{m} = nn.Linear({w}, {w}, bias=False)", "{y} = self.{m}({x})"),
    "wide": (
        "self.{m} = nn.Sequential(nn.Linear({w}, 4 * {w}), nn.GELU(), nn.Linear(4 * {w}, {w}))",
        "{y} = {x} + self.{m}({x})",
    ),
    "twice": ("self.{m} = nn.Linear({w}, {w})", "{y} = self.{m}(torch.tanh(self.{m}({x})))"),
    "tied": (
        "self.{m} = nn.Linear({w}, {w})\nself.{m}_again = nn.Linear({w}, {w})\nself.{m}_again.weight = self.{m}.weight",
        "{y} = self.{m}_again(F.silu(self.{m}({x})))",
    ),
    "frozen": ("self.{m} = nn.Linear({w}, {w}).requires_grad_(False)", "{y} = self.{m}({x}).tanh()"),
    "half_frozen": (
        "self.{m} = nn.Linear({w}, {w})\nself.{m}.bias.requires_grad_(False)",
        "{y} = F.softplus(self.{m}({x}))",
    ),
    "bilinear": ("self.{m} = nn.Bilinear({w}, {w}, {w})", "{y} = self.{m}({x}, {z})"),
    "layer_norm": ("self.{m} = nn.LayerNorm({w})", "{y} = self.{m}({x})"),
    "rms_norm": ("self.{m} = nn.RMSNorm({w})", "{y} = self.{m}({x})"),
    "group_norm": ("self.{m} = nn.GroupNorm(4, {w})", "{y} = self.{m}({x})"),
    "batch_norm": ("self.{m} = nn.BatchNorm1d({w})", "{y} = self.{m}({x})"),
    "batch_norm_2d": (
        "self.{m} = nn.BatchNorm2d(4)",
        "{y} = self.{m}({x}.view({n}, 4, 2, -1)).flatten(1)",
    ),
    "plain_batch_norm": (
        "self.{m} = nn.BatchNorm1d({w}, affine=False, track_running_stats=False)",
        "{y} = self.{m}({x})",
    ),
    "instance_norm": (
        "self.{m} = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)",
        "{y} = self.{m}({x}.view({n}, 4, -1)).flatten(1)",
    ),
    "conv_1d": ("self.{m} = nn.Conv1d(1, 3, 3, padding=1)", "{y} = self.{m}({x}[:, None]).mean(1)"),
    "conv_2d": (
        "self.{m} = nn.Conv2d(4, 4, 3, padding=1, bias=False)",
        "{y} = self.{m}({x}.view({n}, 4, 2, -1)).flatten(1)",
    ),
    "conv_depthwise": (
        "self.{m} = nn.Conv2d(4, 8, (1, 3), padding=(0, 1), groups=4)",
        "{y} = F.glu(self.{m}({x}.view({n}, 4, 2, -1)), 1).flatten(1)",
    ),
    "conv_transposed": (
        "self.{m} = nn.ConvTranspose1d(2, 1, 2, stride=2)",
        "{y} = self.{m}({x}.view({n}, 2, -1)).flatten(1)",
    ),
    "embedding": ("self.{m} = nn.Embedding({w}, {w})", "{y} = {x} + self.{m}({x}.argmax(1))"),
    "embedding_bag": (
        "self.{m} = nn.EmbeddingBag({w}, {w}, mode='sum')",
        "{y} = {x} * self.{m}({x}.argsort(1)[:, :4])",
    ),
    "embedding_bag_mean": (
        "self.{m} = nn.EmbeddingBag({w}, {w})",
        "{y} = {x} - self.{m}({x}.topk(3, 1).indices)",
    ),
    "embedding_bag_max": (
        "self.{m} = nn.EmbeddingBag({w}, {w}, mode='max')",
        "{y} = {x} * self.{m}({x}.argsort(1)[:, :4])",
    ),
    "attention": (
        "self.{m} = nn.MultiheadAttention({w}, 2, dropout=0.2, batch_first=True)",
        "{y} = self.{m}({x}[None], {x}[None], {z}[None], need_weights=False)[0][0]",
    ),
    "sdpa": (
        "self.{m} = nn.Linear({w}, 3 * {w})",
        "q, k, v = self.{m}({x}).view(1, {n}, 3, 2, -1).permute(2, 0, 3, 1, 4)\n"
        "{y} = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)[0]",
    ),
    "gru_cell": ("self.{m} = nn.GRUCell({w}, {w})", "{y} = self.{m}({x}, {z})"),
    "prelu": ("self.{m} = nn.PReLU({w})", "{y} = self.{m}({x})"),
    "scale": ("self.{m} = nn.Parameter(torch.ones({w}))", "{y} = {x} * self.{m}.expand({n}, -1)"),
    "checkpoint": (
        "self.{m} = nn.Sequential(nn.Linear({w}, {w}), nn.Dropout(0.1), nn.Tanh())",
        "{y} = checkpoint(self.{m}, {x}, use_reentrant=False)",
    ),
    "autocast": (
        "self.{m} = nn.Linear({w}, {w})",
        "with torch.autocast('cpu', torch.bfloat16):\n    {y} = self.{m}({x})\n{y} = {y}.float()",
    ),
    "double": ("self.{m} = nn.Linear({w}, {w}, dtype=torch.float64)", "{y} = self.{m}({x}.double()).float()"),
}

RANDOM = {
    "dropout": ("", "{y} = F.dropout({x}, 0.3, self.training)"),
    "dropout_in_place": ("self.{m} = nn.Dropout(0.4, inplace=True)", "{y} = self.{m}({x} * 1.5)"),
    "alpha_dropout": ("self.{m} = nn.AlphaDropout(0.2)", "{y} = self.{m}({x})"),
    "dropout_2d": ("self.{m} = nn.Dropout2d(0.5)", "{y} = self.{m}({x}.view({n}, 4, 2, -1)).reshape({n}, {w})"),
    "noise": ("", "{y} = {x} + 0.1 * torch.randn_like({x})"),
    "rand": ("", "{y} = {x} * torch.rand({n}, 1)"),
    "gumbel": ("", "{y} = {x} + F.gumbel_softmax({x}, hard=True)"),
    "bernoulli": ("", "{y} = {x} * torch.bernoulli(torch.full_like({x}, 0.6))"),
    "permuted": ("", "{y} = {x}[torch.randperm({n})]"),
    "rrelu": ("", "{y} = F.rrelu({x}, training=self.training)"),
    "multinomial": ("", "{y} = {x} * (1 + torch.multinomial({x}.nan_to_num().softmax(1), 1))"),
    "normal_in_place": ("", "{y} = {x} + torch.empty({n}, {w}).normal_(0, 0.1)"),
}

POINTWISE = {
    "activation": ("", "{y} = F.gelu({x}) + F.silu({x}) * F.relu({z})"),
    "elu": ("", "{y} = F.elu({x}) - F.hardswish({x}) + F.mish({z})"),
    "trigonometry": ("", "{y} = torch.sin({x}) * torch.cos({z}) + torch.atan2({x}, 2 + {z}.abs())"),
    "rare_functions": ("", "{y} = torch.erf({x}) + torch.sinc({x}) + torch.lgamma(1.5 + {x}.abs())"),
    "xlogy": ("", "{y} = torch.xlogy({x}, 1 + {z}.abs()) + torch.hypot({x}, 1 + {x}.detach())"),
    "lerp": ("", "{y} = torch.lerp({x}, {z}, 0.3)"),
    "addcmul": ("", "{y} = torch.addcmul({x}, {x}, {z}, value=0.5)"),
    "addcdiv": ("", "{y} = torch.addcdiv({x}, {z}, 1 + {x}.square())"),
    "where": ("", "{y} = torch.where({x} > 0, {x}, {z} * 0.1)"),
    "clamp": ("", "{y} = {x}.clamp(-1, 1) + {x}.clamp_min({z})"),
    "glu": ("", "{y} = F.glu(torch.cat([{x}, {z}], 1))"),
    "softmax": ("", "{y} = {x}.softmax(1) + {z}.log_softmax(0)"),
    "residual": ("", "{y} = {x} + {z}"),
    "product": ("", "{y} = {x} * {z}.sigmoid()"),
    "power": ("", "{y} = ({x}.abs() + 0.1) ** 1.5 - {x} ** 2"),
    "complex": (
        "",
        "{y} = torch.view_as_real(torch.view_as_complex({x}.contiguous().view({n}, -1, 2)) * (1 + 2j)).flatten(1)",
    ),
    "polar": ("", "{y} = torch.polar({x}.abs() + 0.1, {z}).real"),
    "bfloat": ("", "{y} = ({x}.bfloat16() * 1.25).float()"),
    "no_grad": ("", "with torch.no_grad():\n    scale = {x}.abs().amax() + 1\n{y} = {x} / scale"),
    "detached": ("", "{y} = {x} - {x}.detach().mean(0) + {z}.detach()"),
    "nan_to_num": ("", "{y} = torch.nan_to_num({x}.log(), 0.5, 0.5, -0.5)"),
    "leaky": ("", "{y} = F.leaky_relu({x}, 0.2) + F.hardtanh({z}) + F.celu({x}) + F.logsigmoid({x})"),
    "maximum": ("", "{y} = torch.maximum({x}, {z}) + torch.fmin({x}, {z})"),
}

REDUCING = {
    "cumsum": ("", "{y} = {x}.cumsum(1) - {x}.cumsum(0)"),
    "cumprod": ("", "{y} = ({x}.sigmoid() + 0.5).cumprod(1)"),
    "prod": ("", "{y} = {x} * ({x}.sigmoid() + 0.5).prod(1, keepdim=True)"),
    "prod_all": ("", "{y} = {x} * {x}[0, :4].prod()"),
    "logcumsumexp": ("", "{y} = {x}.logcumsumexp(1)"),
    "cummax": ("", "{y} = {x}.cummax(1).values + {x}.cummin(0).values"),
    "logsumexp": ("", "{y} = {x} - {x}.logsumexp(1, keepdim=True)"),
    "topk": ("", "{y} = {x} + {x}.topk(2, 1).values.sum(1, keepdim=True)"),
    "sort": ("", "{y} = {x}.sort(1).values + {x}.sort(dim=0, descending=True, stable=True).values"),
    "kthvalue": ("", "{y} = {x} - {x}.kthvalue(2, 1, keepdim=True).values - {x}.median(1, keepdim=True).values"),
    "amax": ("", "{y} = ({x} - {x}.amax(1, keepdim=True)) / (1 + {x}.amax(0) - {x}.amin(0))"),
    "max": ("", "{y} = {x} - {x}.max(1, keepdim=True).values + {x}.max()"),
    "var": ("", "{y} = {x} / (1 + {x}.var(1, keepdim=True)) + {x}.std(0)"),
    "var_mean": ("", "var, mean = torch.var_mean({x}, 1, keepdim=True)\n{y} = ({x} - mean) * (var + 1).rsqrt()"),
    "norm": (
        "",
        "{y} = F.normalize({x} + 0.1, dim=1) + torch.linalg.vector_norm({z} + 0.1, ord=3, dim=1, keepdim=True)",
    ),
    "cosine": ("", "{y} = {x} * F.cosine_similarity({x} + 0.1, {z} - 0.1, dim=1)[:, None]"),
    "cdist": ("", "{y} = torch.cdist({x}, {z} + 1.0) @ {x} / {n}"),
    "pool_max": ("", "{y} = F.max_pool1d({x}[:, None], 3, 1, 1)[:, 0]"),
    "pool_average": ("", "{y} = F.avg_pool2d({x}.view({n}, 1, 4, -1), 3, 1, 1).flatten(1)"),
    "pool_adaptive": ("", "{y} = {x} + F.adaptive_avg_pool1d({x}[:, None], 1)[:, 0]"),
    "pool_adaptive_max": ("", "{y} = {x} + F.adaptive_max_pool2d({x}.view({n}, 1, 4, -1), 1).flatten(1)"),
    "trapezoid": ("", "{y} = {x} + torch.trapezoid({x}, dim=1)[:, None]"),
    "renorm": ("", "{y} = {x}.renorm(2, 0, 1.0)"),
    "loss_smooth": ("", "{y} = {x} * F.smooth_l1_loss({x}, {z}.detach())"),
    "loss_cross": ("", "{y} = {x} + F.cross_entropy({x}, {z}.argmax(1), label_smoothing=0.1)"),
    "loss_binary": ("", "{y} = {x} - F.binary_cross_entropy_with_logits({x}, ({z} > 0).float())"),
    "loss_kl": ("", "{y} = {x} + F.kl_div({x}.log_softmax(1), {z}.softmax(1), reduction='batchmean')"),
    "loss_nll": ("", "{y} = {x} * F.nll_loss({x}.log_softmax(1), {z}.argmin(1))"),
}

MOVING = {
    "gather": ("", "{y} = {x}.gather(1, {z}.argsort(1))"),
    "take_along": ("", "{y} = torch.take_along_dim({x}, {x}.argsort(0), 0)"),
    "scatter": ("", "{y} = torch.zeros_like({x}).scatter(1, {z}.argsort(1), {x})"),
    "scatter_add": ("", "{y} = {z}.scatter_add(1, {x}.argsort(1) // 2, {x})"),
    "scatter_reduce": ("", "{y} = {z}.scatter_reduce(1, {x}.argsort(1) // 2, {x}, 'amax')"),
    "index_add": ("", "{y} = {z}.index_add(0, torch.arange({n}) // 2, {x}, alpha=0.5)"),
    "index_copy": ("", "{y} = {z}.index_copy(0, torch.arange(0, {n}, 2), {x}[::2])"),
    "index_select": ("", "{y} = {x}.index_select(1, {x}[0].argsort())"),
    "index_put": ("", "{y} = {x}.index_put((torch.arange({n}), {x}.argmax(1)), {z}[:, 0], accumulate=True)"),
    "indexed": ("", "{y} = {x}[torch.arange({n}).flip(0)][:, {x}[0].argsort()]"),
    "masked_fill": ("", "{y} = {x}.masked_fill({z} < 0, 0.3)"),
    "roll": ("", "{y} = {x}.roll(1, 0) + {x}.flip(1)"),
    "triangle": ("", "{y} = {x}.tril() + {x}.triu(1) * 2"),
    "diagonal": ("", "{y} = {x} + torch.diag_embed({x}[0])[0] + {x}[:4, :4].diagonal().sum()"),
    "repeat": ("", "{y} = {x}.repeat(2, 1)[1::2] + {x}.repeat_interleave(2, 1)[:, ::2]"),
    "unbind": ("", "{y} = torch.stack([row * i for i, row in enumerate({x}.unbind(1))], 1)"),
    "split": ("", "a, b = {x}.split([{h}, {w} - {h}], 1)\n{y} = torch.cat([b.tanh(), a], 1)"),
    "transposed": ("", "{y} = ({x}.t() * 2).t().contiguous() + {x}.movedim(0, 1).sin().t()"),
    "unfold": ("", "{y} = F.pad({x}, (1, 1)).unfold(1, 3, 1).exp().mean(2)"),
    "im2col": ("", "{y} = F.unfold({x}.view(1, 1, {n}, {w}), (2, 2), stride=2).view(4, -1).t().reshape({n}, {w})"),
    "fold": ("", "{y} = F.fold({x}.reshape(1, 4, -1), ({n}, {w}), (2, 2), stride=2)[0, 0]"),
    "pixel_shuffle": ("", "{y} = F.pixel_shuffle({x}.view(1, 4, -1, {h}), 2).reshape({n}, {w})"),
    "grid_sample": (
        "",
        "grid = torch.stack([{x}, {z}], 2).tanh()[None]\n"
        "{y} = F.grid_sample({x}[None, None], grid, align_corners=False)[0, 0]",
    ),
    "interpolate": ("", "{y} = F.interpolate({x}[None, None], scale_factor=2, mode='bilinear')[0, 0, ::2, ::2]"),
    "nearest": ("", "{y} = F.interpolate({x}[:, None, ::2], size={w})[:, 0]"),
    "pad_reflect": ("", "{y} = F.pad({x}[None], (2, 2), mode='reflect')[0, :, 1:-3]"),
    "as_strided": ("", "{y} = ({x} * 2).as_strided(({n}, {w}), ({w}, 1)).sin()"),
    "one_hot": ("", "{y} = {x} + F.one_hot({x}.argmax(1), {w})"),
    "searchsorted": ("", "{y} = {x} * torch.searchsorted({x}.detach().sort(1).values, {z}.detach())"),
    "tile": ("", "{y} = {x}[:1].tile({n}, 1) + {x}[:, :1].broadcast_to({n}, {w})"),
    "meshgrid": ("", "a, b = torch.meshgrid({x}[:, 0], {x}[0], indexing='ij')\n{y} = a * b"),
}

ALGEBRA = {
    "einsum": (
        "self.{m} = nn.Parameter(torch.randn({w}, {w}, 2) / 4)",
        "{y} = torch.einsum('ni,ijk->nj', {x}, self.{m})",
    ),
    "bmm": ("", "{y} = torch.bmm({x}.view({n}, 2, -1), {z}.view({n}, -1, 2)).sum((1, 2))[:, None] * {x} / {w}"),
    "baddbmm": ("", "{y} = torch.baddbmm({x}[None], {x}[None], ({z}.t() @ {x})[None] / {n})[0]"),
    "outer": ("", "{y} = torch.outer({x}[:, 0], {z}[0])"),
    "gram": ("", "{y} = {x} @ ({x}.t() @ {x}) / ({n} * {w})"),
    "fft": ("", "{y} = torch.fft.irfft(torch.fft.rfft({x}) * 2, n={w})"),
    "fft_2d": ("", "{y} = torch.fft.fft2({x}).abs() / {n}"),
    "slogdet": ("", "{y} = {x} * torch.linalg.slogdet({x}.t() @ {x} / {n} + torch.eye({w})).logabsdet"),
    "det": ("", "{y} = {x} * torch.linalg.det({x}[:4].t()[:4] * 0.1 + torch.eye(4))"),
    "inverse": ("", "{y} = {x} @ torch.linalg.inv({x}.t() @ {x} / {n} + 2 * torch.eye({w}))"),
    "solve": ("", "{y} = torch.linalg.solve({x}.t() @ {x} / {n} + 2 * torch.eye({w}), {z}.t()).t()"),
    "cholesky": (
        "",
        "z = {x}.tanh().nan_to_num()\n{y} = {x} @ torch.linalg.cholesky(z.t() @ z / {n} + 2 * torch.eye({w}))",
    ),
    "triangular": (
        "",
        "{y} = torch.linalg.solve_triangular({x}[:4, :4].tril() + 4 * torch.eye(4), {x}.reshape(4, -1), upper=False).reshape({n}, {w})",
    ),
    "qr": ("", "{y} = {x} @ torch.linalg.qr({x}.t() @ {x} / {n} + 2 * torch.eye({w})).R"),
    "svd": ("", "{y} = {x} * torch.linalg.svdvals({x}.tanh().nan_to_num()).sum()"),
    "matrix_exp": ("", "{y} = {x} @ torch.linalg.matrix_exp(({x}.t() @ {x}) / ({n} * {w}))"),
    "trace": ("", "{y} = {x} * torch.trace({x}) + torch.dot({x}[:, 0], {z}[:, 1])"),
    "kron": ("", "{y} = torch.kron({x}[:, :4], {x}[:1, :{q}])"),
    "addmv": ("", "{y} = {x} + torch.mv({x}, {z}[0])[:, None] / {w}"),
}

IN_PLACE = {
    "relu_": ("", "{y} = ({x} + 1).relu_()"),
    "add_": ("", "{y} = {x} * 2\n{y} += {z}\n{y}.mul_(0.5)"),
    "row_set": ("", "{y} = {x}.clone()\n{y}[0] = 0"),
    "row_given": ("", "{y} = {x}.clone()\n{y}[1] = {z}[0]"),
    "columns_scaled": ("", "{y} = {x}.sin()\n{y}[:, 1:] *= 2"),
    "transposed_written": ("", "{y} = {x}.cos()\n{y}.t()[2:].add_(1)"),
    "flat_written": ("", "{y} = {x} - 1\n{y}.view(-1)[::2].mul_(3)"),
    "masked_": ("", "{y} = {x}.sin()\n{y}.masked_fill_({z} > 1, 0.0)"),
    "mask_set": ("", "{y} = {x} * 1.0\n{y}[{y} > 1] = 1.0"),
    "index_set": ("", "{y} = {x} * 1.0\n{y}[torch.arange(0, {n}, 3)] = 0.25"),
    "chain_": ("", "{y} = ({x} * 0.5).clamp_(-1, 1).add_(2).tanh_()"),
    "filled": ("", "{y} = torch.empty({n}, {w})\n{y}[:, :{h}] = {x}[:, {h}:]\n{y}[:, {h}:] = {z}[:, :{h}]"),
    "gathered_rows": ("", "{y} = torch.zeros({n}, {w})\nfor i in range(4):\n    {y}[i] = {x}[i] * i"),
    "copied": ("", "{y} = torch.empty_like({x})\n{y}.copy_({x}).mul_({z})"),
    "rows_in_turn": ("", "{y} = {x}.clone()\nfor i in range(3):\n    {y}[i].mul_(2)"),
    "scatter_": ("", "{y} = {x}.clone()\n{y}.scatter_(1, {z}.argmax(1, keepdim=True), 0.5)"),
    "index_add_": ("", "{y} = {x}.clone()\n{y}.index_add_(0, torch.tensor([0, 1, 1]), {z}[:3])"),
    "after_read": ("", "{y} = {x} * 3\nseen = {y}.sum()\n{y}.div_(2)\n{y} = {y} + seen"),
    "diagonal_": ("", "{y} = {x}.clone()\n{y}.diagonal().zero_()"),
    "fill_diagonal_": ("", "{y} = {x}.clone()\n{y}.fill_diagonal_(0.5)"),
    "sub_view": ("", "base = {x}.clone()\npart = base[1:-1]\npart += 1\n{y} = base * part.mean()"),
    "activation_": ("self.{m} = nn.Sequential(nn.Linear({w}, {w}), nn.SiLU(inplace=True))", "{y} = self.{m}({x})"),
    "square_": ("", "{y} = {x}.neg().square_().add_(1).sqrt_()"),
    "lerp_": ("", "{y} = {x}.clone().lerp_({z}, 0.25)"),
    "cumsum_": ("", "{y} = {x}.clone().cumsum_(1)"),
    "addmm_": ("", "{y} = {x}.clone().addmm_({x}, {z}.t() @ {z} / {n}, alpha=0.5)"),
}  # fmt: skip

BUFFERS = {
    "moving": (
        "self.register_buffer('{m}', torch.zeros({w}))",
        "with torch.no_grad():\n    self.{m}.mul_(0.9).add_({x}.mean(0), alpha=0.1)\n{y} = {x} - self.{m}",
    ),
    "moving_before": (
        "self.register_buffer('{m}', torch.zeros({w}))",
        "{y} = {x} - self.{m}\nwith torch.no_grad():\n    self.{m}.lerp_({x}.mean(0), 0.1)",
    ),
    "assigned": (
        "self.register_buffer('{m}', torch.zeros({w}))",
        "self.{m} = self.{m} * 0.9 + {x}.detach().mean(0)\n{y} = {x} + self.{m}",
    ),
    "queue": (
        "self.register_buffer('{m}', torch.randn({n}, {w}))",
        "{y} = {x} @ (self.{m}.clone().t() @ self.{m}) / {n}\nself.{m}[:2] = {x}.detach()[:2]",
    ),
    "queue_rolled": (
        "self.register_buffer('{m}', torch.randn(2 * {n}, {w}))",
        "with torch.no_grad():\n    self.{m}.copy_(torch.cat([{x}, self.{m}[:{n}]]))\n{y} = {x} + self.{m}[{n}:]",
    ),
    "counter": (
        "self.register_buffer('{m}', torch.zeros((), dtype=torch.long))",
        "self.{m} += 1\n{y} = {x} / self.{m}.clone()",
    ),
    "counter_after": (
        "self.register_buffer('{m}', torch.ones(()))",
        "{y} = {x} * self.{m}.clone()\nself.{m}.add_(1)",
    ),
    "row_of_a_buffer": (
        "self.register_buffer('{m}', torch.zeros(3, {w}))",
        "self.{m}[1].add_({x}.detach().mean(0))\n{y} = {x} + self.{m}.sum(0)",
    ),
    "counted_rows": (
        "self.register_buffer('{m}', torch.zeros({w}))",
        "self.{m}.index_add_(0, {x}.argmax(1), torch.ones({n}))\n{y} = {x} * (1 + self.{m}).log()",
    ),
    "read": ("self.register_buffer('{m}', torch.randn({w}))", "{y} = {x} * self.{m}"),
}

GROUPS = {
    "layers": LAYERS, "random": RANDOM, "pointwise": POINTWISE, "reducing": REDUCING, "moving": MOVING,
    "algebra": ALGEBRA, "in_place": IN_PLACE, "buffers": BUFFERS,
}  # fmt: skip
PIECES = {name: piece for group in GROUPS.values() for name, piece in group.items()}

"""What the monitors cost: a step that they look at, beside one that they do not."""

from types import SimpleNamespace

import torch
from detectron2.utils.events import EventStorage

from moco_d2.benchmark.method import moco_config
from moco_d2.benchmark.timing import ratio, time_in_turns, timing_table
from moco_d2.engine.alarms import Alarms
from moco_d2.engine.health import Health
from moco_d2.engine.monitors import Monitors
from moco_d2.engine.scalars import ScalarBuffer
from moco_d2.modeling.moco import MoCo

_MOMENTUM = 0.999
_IMAGES = 1_281_167  # in ImageNet; nothing is computed for each


def measure_monitors(
    repeats: int, *, batch: int, size: int, device: str
) -> tuple[str, dict[str, float]]:
    """Time a step with all monitors, a picture of views, and the judging of what they log.

    Args:
        batch: images a step.
        size: side of the views.
        device: "cpu" or "cuda".

    Returns:
        a table; the ratio of the steps, ``watched_step``; and what follows for training at the
        default MONITORS.PERIOD, ``at_default_period``.
    """
    cfg = moco_config(batch, device)
    model = MoCo(cfg).to(device).train()
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.03, momentum=0.9, foreach=True)
    shape = (batch, 3, size, size)
    views = [torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(2)]
    buffer, storage = ScalarBuffer(), EventStorage()
    monitors = Monitors(model, keys_per_step=batch, period=1, picture_period=1, order="RGB")
    monitors.trainer = SimpleNamespace(iter=0, storage=storage)
    health = Health(cfg, _IMAGES, Alarms())

    def step(watched: bool) -> None:
        batches = iter([{"views": views}])
        if watched:
            monitors.before_step()
            batches = monitors.see(batches)
        with buffer:
            optimizer.zero_grad()
            loss = model(next(batches))["loss_contrastive"]
            loss.backward()
            optimizer.step()
            buffer.put("total_loss", loss)
            model.finish_step(_MOMENTUM)
            if watched:
                monitors.after_step()
        written = buffer.flush(storage)  # waits for the device
        if watched:
            health.update(written, storage)
        storage.clear_images()
        buffer.iteration = monitors.trainer.iter = storage.iter = storage.iter + 1

    watched, plain = "watched step", "plain step"
    timings = time_in_turns(
        {watched: lambda: step(True), plain: lambda: step(False)}, repeats=repeats
    )
    over = ratio(timings, watched, plain)
    period = cfg.MONITORS.PERIOD
    return timing_table(timings, f"step of {batch}", plain), {
        "watched_step": over,
        "at_default_period": 1 + (over - 1) / period,
    }

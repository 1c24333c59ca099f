"""Student, teacher and optimizer state take turns on a GPU; who waits, waits in CPU memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common.loop.policy import Policy
from common.loop.sampler import Sampler
from common.run.metrics import StepMetrics
from common.training import offload
from common.training.optim import AdamW


class Offloading:
    """Moves models with `param_offload`, and AdamW's state with `optimizer_offload = "rollout"`."""

    def __init__(self, cfg: Any, student: Policy, teacher: Any, sampler: Sampler, optimizer: AdamW, log: StepMetrics):
        """Sends the teacher to CPU memory, until it is needed.

        Args:
            cfg: the Config of a GKD script.
            student: leaves while the teacher computes.
            teacher: leaves while the student does.
            sampler: frees its cache when the student leaves.
            optimizer: its state leaves during rollouts.
            log: takes GiB moved and seconds.
        """
        self.moves_models = cfg.param_offload
        self.moves_optimizer = cfg.optimizer_offload == "rollout"
        self.teacher, self.optimizer, self.log = teacher, optimizer, log
        self.release = sampler.release_for_update  # copies on GPUs of their own keep their cache: they may be at work
        self.replicas = [offload.Offloader(replica) for replica in student.trained]
        if self.moves_models:
            teacher.offload()

    @contextmanager
    def teacher_phase(self) -> Iterator[None]:
        """The block in which the teacher computes, and the student waits."""
        if not self.moves_models:
            yield
            return
        with self.log.time("offload"):
            if self.release:
                self.release()
            self.log.add(offloaded_gib_student=sum(replica.offload() for replica in self.replicas))
            self.teacher.onload()
        yield
        with self.log.time("offload"):
            self.log.add(offloaded_gib_teacher=self.teacher.offload())
            for replica in self.replicas:
                replica.onload()

    @contextmanager
    def teacher_for_evaluation(self) -> Iterator[None]:
        """The block in which student and teacher are both needed."""
        self.teacher.onload()
        yield
        if self.moves_models:
            self.teacher.offload()

    def offload_optimizer(self) -> None:
        """Before a rollout."""
        if self.moves_optimizer:
            with self.log.time("offload"):
                self.log.add(offloaded_gib_optimizer=self.optimizer.offload())

    def onload_optimizer(self) -> None:
        """Before an update."""
        if self.moves_optimizer:
            with self.log.time("offload"):
                self.optimizer.onload()

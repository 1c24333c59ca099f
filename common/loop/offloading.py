"""Student, teacher and optimizer state take turns on a GPU; the idle ones wait in CPU memory."""

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
        """Moves the teacher to CPU memory until it is needed.

        Args:
            cfg: Config of a GKD script.
            student: is offloaded while the teacher computes.
            teacher: is offloaded while the student computes.
            sampler: frees its cache when the student is offloaded.
            optimizer: its state is offloaded during rollouts.
            log: receives seconds, and GiB moved.
        """
        self.moves_models = cfg.param_offload
        self.moves_optimizer = cfg.optimizer_offload == "rollout"
        self.teacher, self.optimizer, self.log = teacher, optimizer, log
        # None if only copies on GPUs of their own sample: they may be at work and keep their caches
        self.release = sampler.release_for_update
        self.replicas = [offload.Offloader(replica) for replica in student.trained]
        if self.moves_models:
            teacher.offload()

    @contextmanager
    def teacher_phase(self) -> Iterator[None]:
        """Surrounds the block in which the teacher computes: the student is offloaded."""
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
        """Surrounds the block that needs both student and teacher on their GPUs."""
        self.teacher.onload()
        yield
        if self.moves_models:
            self.teacher.offload()

    def offload_optimizer(self) -> None:
        """Offloads AdamW's state before a rollout."""
        if self.moves_optimizer:
            with self.log.time("offload"):
                self.log.add(offloaded_gib_optimizer=self.optimizer.offload())

    def onload_optimizer(self) -> None:
        """Brings AdamW's state back before an update."""
        if self.moves_optimizer:
            with self.log.time("offload"):
                self.optimizer.onload()

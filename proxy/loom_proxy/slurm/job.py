"""`SlurmJob`: a job in an allocation of Slurm, with its gateway on the first node."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from loom.errors import LoomError, UnknownAllocation, WaitTimeout, WrongArguments
from loom.slurm.address import SlurmAddress
from loom.slurm.allocation import Allocation
from loom.slurm.queue import Slurm
from loom.slurm.spec import NOTICE, AllocationSpec, MeshSpec
from loom.slurm.ssh import login_of, parse_ssh_address
from loom_proxy.code_sync.folders import SyncResult
from loom_proxy.launched_job import LaunchedJob
from loom_proxy.progress import AFTER, Progress, WaitStep, wanted
from loom_proxy.session.open import connect

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)


class SlurmJob(LaunchedJob):
    """A job in an allocation of Slurm: nodes with a worker each, the first of which has the gateway, and a session.

    Nothing happens before `apply`, `state` or ``with``. Afterwards this object has all attributes of the `Job` that
    it has opened, such as ``hosts``, ``run`` and ``events``. An allocation of the name that lives already is used
    as it is, whatever else is given here.

    A ``with`` block closes the session at its end, and ends the allocation if it has submitted it. An allocation
    that was there before stays; any stays after `detach`. `kill` always ends it.

    Args:
        nodes: number of nodes; the size of the dimension ``hosts``.
        meshes: named meshes in place of ``nodes``, such as ``{"trainers": {"nodes": 2, "gpus_per_node": 8}}``: a
            heterogeneous job. What a mesh does not say of ``partition``, ``account``, ``qos`` and ``gpus_per_node``
            is as given here. They are ``state().trainers`` and so on.
        name: name of the allocation; default ``loom-JOBID``.
        partition: Slurm's partition; by default the cluster's.
        account: the account that pays.
        qos: the quality of service.
        gpus_per_node: GPUs of each node, as ``sbatch`` takes them: a number, or ``TYPE:NUMBER``.
        time_limit: as ``sbatch`` takes it: minutes, ``HOURS:MINUTES:SECONDS`` or ``DAYS-HOURS:MINUTES:SECONDS``.
        notice: seconds before the time limit at which training processes are told to save their state.
        chain: allocations in all, each of which submits its successor.
        venv: virtual environment with Loom on the nodes; by default the one of this program, on a login node.
        container: image with Loom; a file ``.sif`` is run by Apptainer, any other by pyxis.
        wheelhouse: folder of wheels on the cluster, of which each node makes an environment once.
        options: further options of ``sbatch``, as they are, for each mesh.
        array: equal jobs of ``nodes`` nodes: how many, or as ``sbatch --array`` counts them (``"0-7%4"``). The
            session opens with the nodes of the first; the others join it as they start, see `Job.refresh_hosts`.
        via: the login node, ``ssh://[USER@]HOST[:PORT]``; None if this machine is one.
        sync_dirs: folders to ship to every host with `Job.sync`.
        session: name of a living session to attach to, see `loom.connect`.
        persist: keep the session without a client until it is closed, see `loom.connect`.
        transport: ``"websocket"`` or ``"http"``, see `loom.connect`; None tries both.
        launch_timeout: seconds until the gateway has to answer; None: as long as the queue takes.

    Raises:
        WrongArguments: an argument makes no sense, whatever the cluster.
        InvalidAddress: ``via`` has another form.
    """

    def __init__(
        self,
        nodes: int = 1,
        *,
        meshes: Mapping[str, Mapping[str, object]] | None = None,
        name: str | None = None,
        partition: str | None = None,
        account: str | None = None,
        qos: str | None = None,
        gpus_per_node: int | str | None = None,
        time_limit: int | str | None = None,
        notice: float = NOTICE,
        chain: int = 1,
        venv: str | os.PathLike[str] | None = None,
        container: str | None = None,
        wheelhouse: str | os.PathLike[str] | None = None,
        options: Sequence[str] = (),
        array: int | str | None = None,
        via: str | None = None,
        sync_dirs: Sequence[str | os.PathLike[str]] = (),
        session: str | None = None,
        persist: bool = False,
        transport: str | None = None,
        launch_timeout: float | None = None,
    ) -> None:
        super().__init__()
        if isinstance(array, int) and array < 1:
            raise WrongArguments(f"an array has 1 job at least, not {array}")
        self._spec = AllocationSpec(
            nodes=nodes,
            name=name,
            partition=partition,
            account=account,
            qos=qos,
            gpus_per_node=None if gpus_per_node is None else str(gpus_per_node),
            time_limit=None if time_limit is None else str(time_limit),
            notice=notice,
            chain=chain,
            venv=None if venv is None else os.fspath(venv),
            container=container,
            wheelhouse=None if wheelhouse is None else os.fspath(wheelhouse),
            options=tuple(options),
            array=f"0-{array - 1}" if isinstance(array, int) else array,
            meshes={mesh: MeshSpec.of(mesh, asked) for mesh, asked in (meshes or {}).items()},
        )
        self._login_address = None if via is None else parse_ssh_address(via)
        self._via = via
        self._sync_dirs = list(sync_dirs)
        self._session = session
        self._persist = persist
        self._transport = transport
        self._timeout = launch_timeout
        self._name = name
        self._doing = "looking for the allocation"
        self.synced: list[SyncResult] = []
        """The results of syncing ``sync_dirs``, in their order."""

    @property
    def name(self) -> str:
        """Name of the allocation.

        Raises:
            LoomError: it has no name before it is submitted.
        """
        if self._name is None:
            raise LoomError("this SlurmJob has no name before it is submitted: give name=…, or call apply()")
        return self._name

    @property
    def address(self) -> str:
        """The address by which `loom.connect` finds the allocation from here."""
        return str(SlurmAddress(self.name, self._login_address))

    def apply(self) -> Self:
        """Submit the allocation, wait for it and open a session, unless this object has an open one.

        Ctrl-C during the wait ends the allocation, as does an error, if it was submitted here.

        Raises:
            AllocationFailed: Slurm refuses the allocation, or it ends or never starts; the text says why.
            WaitTimeout: the gateway has not answered within ``launch_timeout``.
            LoginRefused, LoginUnreachable: ssh does not get to the login node.
            MissingDependency: there is no ssh here, or no Slurm on the login node.
            LoomError: an error of `loom.connect`.
        """
        if self._is_open:
            return self
        self._detached = False
        with self._slurm() as slurm:
            with self._shown():
                allocation = self._living(slurm) or self._submit(slurm)
            self._name = allocation.name
            try:
                with self._shown():
                    allocation.wait(self._tell, self._timeout)
                self._open(allocation.token())
            except BaseException as error:
                self._close_session()
                if self._launched:
                    allocation.cancel()  # nothing trains there yet
                    self._launched = False
                if isinstance(error, TimeoutError) and not isinstance(error, LoomError):
                    raise WaitTimeout(str(error)) from error
                raise
        return self

    def _open(self, token: str) -> None:
        """Open the session."""
        self._job = connect(self.address, token, self._session, persist=self._persist, transport=self._transport)
        self.synced = [self._job.sync(folder) for folder in self._sync_dirs]

    def kill(self) -> None:
        """End the session and the allocation, with the rest of its chain. What trains there saves its state first.

        Raises:
            AllocationFailed: Slurm does not end it. Call `kill` again.
        """
        self._close_session()
        with self._slurm() as slurm:
            Allocation.find(slurm.login, self.name).end(self._tell)
        self._launched = False

    def _living(self, slurm: Slurm) -> Allocation | None:
        """Return the allocation of the name if it lives."""
        if self._name is None:
            return None
        try:
            allocation = Allocation.find(slurm.login, self._name)
        except UnknownAllocation:
            return None
        job = allocation.job()
        return None if job is None or job.state.is_over else allocation

    def _submit(self, slurm: Slurm) -> Allocation:
        allocation = Allocation.submit(slurm, self._spec, self._tell)
        self._launched = True
        self._tell(f"{allocation.name}: submitted job {allocation.job_id}")
        return allocation

    def _shown(self) -> Progress:
        """Return a block that shows what Slurm tells."""
        return Progress(lambda: WaitStep(self._doing), wanted(None), after=AFTER)

    def _tell(self, text: str) -> None:
        self._doing = text
        logger.info("%s", text)

    @contextlib.contextmanager
    def _slurm(self) -> Iterator[Slurm]:
        login = login_of(self._via)
        try:
            yield Slurm(login)
        finally:
            login.close()

    def __repr__(self) -> str:
        where = "" if self._via is None else f" via {self._via}"
        return f"<SlurmJob {self._name or 'without a name yet'!r}{where}: nodes={self._spec.node_count}>"

/** The kinds of faults and their parameters: the table of `loom.control.fault_kinds`. A test compares it with its documentation. */

export interface FaultParam {
  name: string;
  type: 'int' | 'float' | 'text' | 'list';
  default: number | string | string[];
  what: string;
  least?: number;
  most?: number;
  choices?: string[];
  /** Whether an empty text is refused. */
  needed?: boolean;
}

export interface FaultKind {
  name: string;
  of: 'replica' | 'host' | 'session' | 'gateway' | 'weaver';
  what: string;
  /** The default duration in seconds; null: the fault is over at once. */
  lasts: number | null;
  /** Whether the process does not survive the fault. */
  ends: boolean;
  params: FaultParam[];
}

export const MAX_DURATION = 3600;

const peers: FaultParam = {
  name: 'peers',
  type: 'list',
  default: [],
  what: 'addresses of the hosts on the other side; empty: all but this host itself',
};
const device: FaultParam = {
  name: 'device',
  type: 'text',
  default: '',
  what: 'the network device; empty: the one of the route to other hosts',
};

function kind(
  name: string,
  what: string,
  { of = 'replica', lasts = null, ends = false, params = [] }: Partial<Omit<FaultKind, 'name' | 'what'>> = {},
): FaultKind {
  return { name, of, what, lasts, ends, params };
}

export const FAULTS: readonly FaultKind[] = [
  kind('sigkill', 'The process is killed, as the kernel does when memory is short.', { ends: true }),
  kind('sigstop', 'The process hangs: it is stopped, and continues afterwards.', { lasts: 5 }),
  kind('segfault', 'The process reads an invalid address, and crashes.', { ends: true }),
  kind('exception', 'A step raises InjectedFault.', {
    ends: true,
    params: [{ name: 'text', type: 'text', default: '', what: 'the text of the exception' }],
  }),
  kind(
    'out_of_memory',
    'A step allocates all the memory that it may have, bounded by an rlimit (it raises MemoryError) or by a cgroup (the kernel kills the process).',
    {
      ends: true,
      params: [
        {
          name: 'megabytes',
          type: 'int',
          default: 256,
          what: 'megabytes that the process may allocate in addition',
          least: 1,
          most: 65536,
        },
        {
          name: 'bound',
          type: 'text',
          default: 'rlimit',
          what: 'the mechanism of the bound',
          choices: ['rlimit', 'cgroup'],
        },
      ],
    },
  ),
  kind(
    'gil_deadlock',
    "A C function waits and holds the interpreter's lock: no thread of the process runs, heartbeats end.",
    { lasts: 10 },
  ),
  kind('pg_abort', 'The process groups of torch.distributed are aborted, as after the loss of a peer.'),
  kind('slow_rank', 'Each step takes longer.', {
    lasts: 10,
    params: [
      { name: 'seconds', type: 'float', default: 0.5, what: 'seconds by which each step is longer', least: 0, most: 600 },
    ],
  }),
  kind('clock_jump', 'time.time() of the process jumps; the monotonic clock goes on.', {
    lasts: 10,
    params: [
      {
        name: 'seconds',
        type: 'float',
        default: 3600,
        what: 'seconds to jump; backwards if negative',
        least: -1e8,
        most: 1e8,
      },
    ],
  }),
  kind('nan_loss', 'The outputs of the model, and so the loss, are NaN for some steps.', {
    lasts: 60,
    params: [{ name: 'steps', type: 'int', default: 1, what: 'number of steps', least: 1, most: 1_000_000 }],
  }),
  kind('lost_host', 'The worker is killed with all its processes; then it is restarted. In Kubernetes its pod is deleted.', {
    of: 'host',
    lasts: 5,
    ends: true,
  }),
  kind('partition', 'No packets pass between the host and others.', { of: 'host', lasts: 5, params: [peers] }),
  kind('link_down', 'A network device of the host is down.', { of: 'host', lasts: 5, params: [device] }),
  kind('loss', 'Packets to the host are lost.', {
    of: 'host',
    lasts: 10,
    params: [
      { name: 'percent', type: 'int', default: 10, what: 'percentage of lost packets', least: 1, most: 100 },
      peers,
    ],
  }),
  kind('delay', 'Packets of the host are delayed.', {
    of: 'host',
    lasts: 10,
    params: [
      { name: 'milliseconds', type: 'float', default: 100, what: 'milliseconds of delay', least: 0.1, most: 60_000 },
      device,
    ],
  }),
  kind('bandwidth', 'The bandwidth of a network device of the host is limited.', {
    of: 'host',
    lasts: 10,
    params: [
      { name: 'megabits', type: 'float', default: 10, what: 'megabits a second', least: 0.01, most: 1e6 },
      device,
    ],
  }),
  kind('full_disk', 'The file system of a folder is full.', {
    of: 'host',
    lasts: 10,
    params: [
      {
        name: 'folder',
        type: 'text',
        default: '',
        what: 'a folder on the file system, such as that of the checkpoints',
        needed: true,
      },
      {
        name: 'most',
        type: 'int',
        default: 1024,
        what: 'megabytes to write at most; a file system with more room is refused',
        least: 1,
        most: 1 << 20,
      },
    ],
  }),
  kind('corrupt_checkpoint', 'Bytes of the newest checkpoint in a folder are changed, and restored afterwards.', {
    of: 'host',
    lasts: 30,
    params: [
      { name: 'folder', type: 'text', default: '', what: 'the folder of the checkpoints', needed: true },
      {
        name: 'bytes',
        type: 'int',
        default: 64,
        what: 'bytes to change in each file of the checkpoint',
        least: 1,
        most: 1 << 20,
      },
      { name: 'seed', type: 'int', default: 0, what: 'seed of the choice of bytes', least: 0, most: 2 ** 53 },
    ],
  }),
  kind('dead_driver', 'The driver of a session is killed.', { of: 'session' }),
  kind('dead_gateway', 'The gateway is killed.', { of: 'gateway' }),
  kind('dead_weaver', 'The weaver is killed; the gateway starts another one.', { of: 'weaver' }),
];

export function faultKind(name: string): FaultKind | undefined {
  return FAULTS.find((one) => one.name === name);
}

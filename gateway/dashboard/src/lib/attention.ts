/** What somebody should look at first: runs, devices, replicas that are drained, and a weaver that stores nothing. */

import { shortName } from './format';
import { formatRoute } from './route';
import { trouble } from './runtable';
import { grouped } from './sets';
import type { DeviceInfo, Run, WeaverStatus } from './types';

const RECENT = 24 * 3600; // seconds for which a crash is news

export interface Concern {
  key: string;
  /** A word, such as `crashed`. */
  what: string;
  tone: 'bad' | 'warning';
  /** Its name, and where more of it is. */
  name: string;
  href: string;
  why: string;
  time: number | null;
}

interface Member {
  id: string;
  group: string;
  state: string;
  changed: number;
}

export interface Seen {
  /** The latest first. */
  runs: readonly Run[];
  devices: readonly DeviceInfo[];
  replicas: Iterable<Member>;
  status: WeaverStatus | null;
  now: number;
}

/** Return what somebody should look at, the worst first. */
export function concernsOf({ runs, devices, replicas, status, now }: Seen): Concern[] {
  return [...ofWeaver(status), ...ofRuns(runs, now), ...ofDevices(devices), ...drained(replicas)];
}

function ofWeaver(status: WeaverStatus | null): Concern[] {
  if (status?.undurable_since == null) return [];
  const why = `${status.undurable_reason || 'its disk takes nothing'}: commands are refused until there is room`;
  return [{ key: 'disk', what: 'disk', tone: 'bad', name: 'The weaver stores nothing', href: formatRoute('sessions'), why, time: status.undurable_since }];
}

const ORDER = ['diverged', 'crashed', 'lost', 'stalled', 'not connected'];

/** A crash is no news any more once a later run of the name has begun. */
function ofRuns(runs: readonly Run[], now: number): Concern[] {
  const later = new Set<string>();
  const found: Concern[] = [];
  for (const run of runs) {
    const name = `${run.session ?? ''}\0${run.name}`;
    const over = run.ended !== null && (later.has(name) || now - run.ended > RECENT);
    later.add(name);
    const what = over ? null : trouble(run);
    if (!what) continue;
    const where = run.first === null ? '' : `${shortName(run.first)} first`;
    const why = [what.why, where, run.step === null ? '' : `at step ${run.step}`].filter(Boolean).join(', ');
    const tone = what.what === 'stalled' || what.what === 'not connected' ? 'warning' : 'bad';
    found.push({ key: `run ${run.id}`, what: what.what, tone, name: run.name, href: formatRoute('runs', [run.id]), why, time: run.ended });
  }
  return found.sort((one, other) => ORDER.indexOf(one.what) - ORDER.indexOf(other.what));
}

function ofDevices(devices: readonly DeviceInfo[]): Concern[] {
  return devices
    .filter((one) => one.state === 'failed')
    .map((one) => ({
      key: `device ${one.uuid}`,
      what: 'failed',
      tone: 'bad',
      name: one.uuid,
      href: formatRoute('devices', [], { device: one.uuid }),
      why: [one.reason, one.server].filter(Boolean).join(', on '),
      time: null,
    }));
}

function drained(replicas: Iterable<Member>): Concern[] {
  return [...grouped([...replicas].filter((one) => one.state === 'draining'), (one) => one.group)].map(([group, members]) => ({
    key: `drained ${group}`,
    what: 'drains',
    tone: 'warning',
    name: group || shortName(members[0]!.id),
    href: formatRoute('replicas', [], { q: group, state: 'draining' }),
    why: members.length === 1 ? shortName(members[0]!.id) : `${members.length} replicas`,
    time: Math.min(...members.map((one) => one.changed)),
  }));
}

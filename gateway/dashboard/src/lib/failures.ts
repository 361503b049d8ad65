/** The chain of a device's failure, and injected faults, from events. */

import type { CommandRun } from './commands';
import { faultKind } from './faults';
import type { DeviceInfo, WeaverEvent } from './types';

export interface Failure {
  event: WeaverEvent;
  device: string;
  server: string;
  reason: string;
  by: string;
  replicas: { replica: string; group: string; state: string; action: string | null; then: WeaverEvent[] }[];
}

/** Return the failures of devices, the newest first: each with its replicas, the action, and what followed. */
export function failureChains(events: readonly WeaverEvent[]): Failure[] {
  const causes = new Map<number, number>();
  for (const one of events) if (typeof one.cause === 'number') causes.set(one.id, one.cause);
  const root = (id: number): number => {
    let at = id;
    for (let steps = 0; causes.has(at) && steps < 50; steps += 1) at = causes.get(at)!;
    return at;
  };
  const failures = events.filter((one) => one.kind === 'device_failed');
  const after = new Map<number, WeaverEvent[]>(failures.map((one) => [one.id, []]));
  for (const one of events) if (one.kind !== 'device_failed') after.get(root(one.id))?.push(one);
  return failures
    .map((event) => {
      const device = (event['device'] as Partial<DeviceInfo> | undefined) ?? {};
      const chain = (event['replicas'] as Failure['replicas'] | undefined) ?? [];
      const followed = after.get(event.id) ?? [];
      return {
        event,
        device: device.uuid ?? '',
        server: device.server ?? '',
        reason: String(event['reason'] ?? ''),
        by: String(event['by'] ?? ''),
        replicas: chain.map((one) => ({ ...one, then: followed.filter((then) => then.replica === one.replica) })),
      };
    })
    .reverse();
}

export interface Injection {
  run: CommandRun;
  fault: string;
  /** The replicas on which it is present. */
  replicas: string[];
  since: number;
  until: number;
}

/** Return the injected faults that last and are not over. */
export function runningInjections(commands: readonly CommandRun[], events: readonly WeaverEvent[], now: number): Injection[] {
  const removed = new Set<string>();
  for (const one of events) if (one.kind === 'fault_removed') removed.add(`${String(one['injection'])} ${one.replica}`);
  const found: Injection[] = [];
  for (const run of commands) {
    if (run.kind !== 'inject' || run.event === null) continue;
    const fault = String(run.params['fault']);
    const lasts = (run.params['duration'] as number | null | undefined) ?? faultKind(fault)?.lasts;
    if (lasts == null) continue;
    const present = [...run.acknowledgements.values()].filter(
      (one) => one.ok && !one.waiting && !removed.has(`${run.id} ${one.replica}`),
    );
    const since = Math.min(...present.map((one) => one.time ?? run.time));
    if (!present.length || now > since + lasts + 15) continue;
    found.push({ run, fault, replicas: present.map((one) => one.replica), since, until: since + lasts });
  }
  return found;
}

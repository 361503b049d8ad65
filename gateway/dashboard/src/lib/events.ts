/** Events as sentences. */

import { describeCommand, onlyTaken } from './commands';
import { isolate, plural, shortName, value } from './format';
import type { Acknowledgement, DeviceInfo, WeaverEvent } from './types';

export type Tone = 'plain' | 'good' | 'warning' | 'bad' | 'command';

export interface Described {
  text: string;
  tone: Tone;
}

const TONES: Record<string, Tone> = {
  run_began: 'good',
  running: 'good',
  registered: 'good',
  applied: 'good',
  fault_removed: 'good',
  paused: 'plain',
  stalled: 'warning',
  recovering: 'warning',
  draining: 'warning',
  refused: 'warning',
  unanswered: 'warning',
  respawn_wanted: 'warning',
  alerted: 'warning',
  weaver_started: 'warning',
  failed: 'bad',
  device_failed: 'bad',
  supervision: 'bad',
  command: 'command',
  policy: 'command',
};

/** How a run ended, as a sentence about it. */
const RUN_ENDS: Record<string, string> = {
  completed: 'is completed',
  'ended early': 'ended early',
  stopped: 'was stopped',
  cancelled: 'was cancelled',
  evicted: 'was evicted',
  crashed: 'crashed',
  lost: 'was lost',
};

export function describeEvent(event: WeaverEvent): Described {
  return { text: sentence(event), tone: toneOf(event) };
}

function toneOf(event: WeaverEvent): Tone {
  if (event.kind === 'run_ended') return event['state'] === 'crashed' || event['state'] === 'lost' ? 'bad' : 'plain';
  if (event.kind === 'supervision' && event['what'] === 'stopped') return 'plain';
  if (event.kind === 'command' && event['do'] === 'inject') return 'warning';
  return TONES[event.kind] ?? 'plain';
}

function sentence(event: WeaverEvent): string {
  const text = (name: string): string => (event[name] == null ? '' : isolate(String(event[name])));
  const params = (event['params'] as Record<string, unknown> | undefined) ?? {};
  const because = (reason: string): string => (reason ? `: ${reason}` : '');
  const at = event['step'] == null ? '' : ` at step ${text('step')}`;
  switch (event.kind) {
    case 'registered':
      return `registered on ${text('host') || 'a host'}${at}`;
    case 'reconnected':
      return `reconnected from ${text('host') || 'a host'}${at}`;
    case 'running':
      return `runs again${from(event)}`;
    case 'paused':
      return 'is paused';
    case 'draining':
      return `drains${because(text('reason'))}`;
    case 'stalled':
      return `takes no steps${event['stack'] ? '; its stack is known' : ''}`;
    case 'recovering':
      return 'is not connected';
    case 'failed':
      return `failed${because([event['ending'] === 'lost' ? 'lost' : '', text('reason') || text('why')].filter(Boolean).join(', '))}`;
    case 'finished':
      return `finished${how(event)}${because(text('reason'))}`;
    case 'command':
      return `${text('by') || 'someone'} gave a command: ${describeCommand(text('do'), params)} (${plural(Number(event['replicas'] ?? 0), 'replica')})`;
    case 'applied':
      return `${isTaken(event) ? 'the program took' : 'applied'} ${text('do')}${at}${changes(event)}`;
    case 'refused':
      return `refused ${text('do')}${because(text('reason') || refusals(event))}`;
    case 'unanswered':
      return `did not answer ${text('do')}${because(text('reason'))}`;
    case 'config':
      return `reports its configuration${at}${changes(event)}`;
    case 'device_failed': {
      const device = event['device'] as Partial<DeviceInfo> | undefined;
      const chain = (event['replicas'] as unknown[] | undefined) ?? [];
      return `device ${isolate(device?.uuid ?? '')} failed${because(text('reason'))} (${plural(chain.length, 'replica')})`;
    }
    case 'devices_changed':
      return `changed its devices${listed('added', event)}${listed('removed', event)}`;
    case 'respawn_wanted':
      return `needs another place${because(text('reason'))}`;
    case 'supervision':
      return `${processes(event)}: ${text('what') || 'ended'}${because(text('reason'))}`;
    case 'spawned':
      return `processes were started: ${text('what') || text('mesh') || 'a mesh'}`;
    case 'policy':
      return `${text('by') || 'someone'} chose ${text('action')} for ${text('group')} when a device fails`;
    case 'alerted':
      return `alert (${text('rule').replaceAll('_', ' ')}): ${text('message')}`;
    case 'fault_removed':
      return 'has no injected fault any more';
    case 'run_began':
      return 'began';
    case 'run_ended':
      return `${RUN_ENDS[text('state')] ?? 'ended'}${event['by'] == null ? '' : ` by ${text('by')}`}${because(text('reason'))}`;
    case 'run_changed':
      return 'was changed';
    case 'weaver_started':
      return `the weaver started and knows ${plural(Number(event['replicas'] ?? 0), 'replica')}`;
    default:
      return event.kind.replaceAll('_', ' ');
  }
}

/** Name the processes that an event is about: by their replicas, else by rank and mesh. */
function processes(event: WeaverEvent): string {
  const replicas = (event['replicas'] as string[] | undefined) ?? [];
  if (replicas.length > 3) return `${plural(replicas.length, 'replica')} of ${isolate(String(event['mesh'] || 'a mesh'))}`;
  if (replicas.length) return replicas.map((id) => isolate(shortName(id))).join(', ');
  const mesh = event['mesh'] ? isolate(String(event['mesh'])) : 'a mesh';
  return event['rank'] == null ? mesh : `rank ${String(event['rank'])} of ${mesh}`;
}

/** How a replica ended, and by whom, from an event or from the replica. */
export function howEnded(ending: unknown, by: unknown): string {
  if (!ending) return '';
  return by ? `${String(ending)} by ${isolate(String(by))}` : String(ending);
}

function how(event: WeaverEvent): string {
  const text = howEnded(event['ending'], event['ended_by']);
  return text ? `, ${text}` : '';
}

function from(event: WeaverEvent): string {
  return typeof event['from'] === 'string' ? ` after ${event['from']}` : '';
}

function isTaken(event: WeaverEvent): boolean {
  const { taken = [], changes = {} } = event as Partial<Acknowledgement>;
  return onlyTaken({ taken, changes });
}

function changes(event: WeaverEvent): string {
  const given = (event['changes'] as Record<string, { old: unknown; new: unknown }> | undefined) ?? {};
  const found = Object.entries(given).map(([key, one]) =>
    one.old == null ? isolate(`${key} = ${value(one.new)}`) : isolate(`${key} ${value(one.old)} → ${value(one.new)}`),
  );
  return found.length ? `: ${found.join(', ')}` : '';
}

function refusals(event: WeaverEvent): string {
  const given = (event['refused'] as Record<string, string> | undefined) ?? {};
  return Object.entries(given)
    .map(([key, reason]) => `${key}: ${reason}`)
    .join('; ');
}

function listed(name: 'added' | 'removed', event: WeaverEvent): string {
  const given = (event[name] as string[] | undefined) ?? [];
  return given.length ? `; ${name} ${given.join(', ')}` : '';
}

/** Commands that this page gives: their messages, which are sent again after a reconnect until they are answered. */

import { takeBack, type CommandLog, type CommandRun } from '../commands';
import { faultKind } from '../faults';
import { shortName } from '../format';
import { isGlob } from '../glob';
import type { CommandKind, Outgoing, PolicyAction, Target } from '../types';
import type { Replicas } from './replicas';

const MOST_TARGETS = 50_000; // characters of a list of replicas: the gateway takes messages of 64 KiB

export interface Surroundings {
  readonly replicas: Replicas;
  readonly log: CommandLog;
  /** Send a message; return whether there was a connection. */
  send(message: Outgoing): boolean;
  /** The name under which commands are given. */
  by(): string;
  clock(): number;
  /** The log has changed. */
  changed(): void;
}

export class Orders {
  #around: Surroundings;
  #unsent = new Map<string, Outgoing>(); // commands without an answer

  constructor(around: Surroundings) {
    this.#around = around;
  }

  /** Give a command and return its id. */
  give(kind: CommandKind, target: Target | undefined, params: Record<string, unknown> = {}): string {
    const id = newId();
    const short = Array.isArray(target) ? this.#shorten(target) : target;
    // Without a target those on the devices are meant.
    const whom = short === undefined ? {} : { target: short };
    this.#submit(kind, short ?? String(params['group'] ?? ''), params, { type: 'command', id, kind, ...whom, params }, true);
    return id;
  }

  setPolicy(group: string, action: PolicyAction): string {
    const id = newId();
    this.#submit('set_policy', group, { action }, { type: 'policy', id, group, action }, true);
    return id;
  }

  inject(fault: string, target: Target, params: Record<string, unknown>, duration: number | null): string {
    const id = newId();
    // A fault of Loom's own processes would be injected twice.
    const again = ['replica', 'host'].includes(faultKind(fault)?.of ?? '');
    const message: Outgoing = { type: 'inject', id, fault, target, params, duration };
    this.#submit('inject', target, { fault, params, duration }, message, again);
    return id;
  }

  removeFault(injection: string): string {
    const id = newId();
    this.#submit('remove_fault', injection, { injection }, { type: 'remove_fault', id, injection }, true);
    return id;
  }

  /** Give the commands that take a command back; return their ids. */
  takeBack(run: CommandRun): string[] {
    return takeBack(run).map((one) => this.give(one.kind, one.target, one.params));
  }

  /** Note that a command was answered. */
  answered(id: string): void {
    this.#unsent.delete(id);
  }

  /** Send again, on a new socket, what was not answered. */
  again(): void {
    const { log, send } = this.#around;
    for (const [id, one] of this.#unsent) {
      const run = log.get(id);
      if (!run || run.phase === 'done') this.#unsent.delete(id);
      else send(one);
    }
  }

  clear(): void {
    this.#unsent.clear();
  }

  /** Return a long list of replicas as a group, or as all, if it is that. */
  #shorten(ids: string[]): Target {
    if (ids.length < 50) return ids;
    const { replicas } = this.#around;
    const wanted = new Set(ids);
    const living = replicas.living();
    if (living.length === wanted.size && living.every((one) => wanted.has(one.id))) return '*';
    const group = replicas.get(ids[0]!)?.group;
    const members = living.filter((one) => one.group === group);
    const other = living.some((one) => one.group !== group && (one.id === group || shortName(one.id) === group));
    const same = members.length === wanted.size && members.every((one) => wanted.has(one.id));
    return group && same && !other && !isGlob(group) && !replicas.get(group) ? group : ids;
  }

  #submit(kind: string, target: Target, params: Record<string, unknown>, message: Outgoing, again: boolean): void {
    const { log, send, by, clock, changed } = this.#around;
    const id = (message as { id: string }).id;
    log.add(id, kind, target, params, by(), clock());
    changed();
    if (Array.isArray(target) && JSON.stringify(target).length > MOST_TARGETS) {
      log.fail(id, 'These are too many single replicas for one command. Choose a group, a glob, or fewer.');
      return;
    }
    if (again) this.#unsent.set(id, message);
    if (!send(message) && !again) log.fail(id, 'There was no connection. Nothing was sent.');
  }
}

/** An id for a command: 32 hexadecimal digits. */
export function newId(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((one) => one.toString(16).padStart(2, '0')).join('');
}

/** The values of all replicas, by their numbers, in typed arrays: ten thousand change in well under a millisecond. */

import { ENDED, STATES } from '../types';
import { NO_REPLICA, NONE, NOT_CONNECTED, type Section } from './frames';

const STATE = 0x7f;
const LEAST = 64;

export class Columns {
  /** The number of replicas that there is room for. */
  size = 0;
  /** An index in `names`, with `NOT_CONNECTED`. */
  state = new Uint8Array(0);
  /** `NONE` if there is no step. */
  step = new Uint32Array(0);
  loss = new Float32Array(0);
  pace = new Float32Array(0);
  /** The bits of `loss` and `pace`: `NONE` if there is no value. Any other NaN is a measured one. */
  lossBits = new Uint32Array(0);
  paceBits = new Uint32Array(0);
  /** An index of the replica's job. */
  job = new Uint32Array(0);
  /** The names of states, in the order of the gateway. */
  names: string[] = [...STATES];
  /** Whether a state, without `NOT_CONNECTED`, is that of a replica that has ended. */
  ended = new Uint8Array(STATE + 1);
  #jobs = new Map<string, number>();

  constructor(names: readonly string[] = STATES) {
    names.forEach((name, at) => this.#name(at, name));
  }

  get jobs(): number {
    return this.#jobs.size;
  }

  /** Take the values of a section; return whether a state has changed. Numbers without a replica are left out. */
  take({ column, numbers, values }: Section): boolean {
    if (column === 'state') return this.#takeStates(numbers, values);
    const into = column === 'step' ? this.step : column === 'loss' ? this.lossBits : this.paceBits;
    if (numbers === null) into.set(values.length > this.size ? values.subarray(0, this.size) : values);
    else for (let at = 0; at < numbers.length; at += 1) if (numbers[at]! < this.size) into[numbers[at]!] = values[at]!;
    return false;
  }

  #takeStates(numbers: Uint32Array | null, values: Uint8Array | Uint32Array): boolean {
    const { state, size } = this;
    let changed = false;
    for (let at = 0; at < values.length; at += 1) {
      const number = numbers === null ? at : numbers[at]!;
      const value = values[at]!;
      // A hole of a dense column is a replica that is about to be forgotten.
      if (number >= size || state[number] === value || (value & STATE) === NO_REPLICA) continue;
      state[number] = value;
      changed = true;
    }
    return changed;
  }

  /** Make room for a number. */
  reserve(number: number): void {
    if (number < this.size) return;
    this.size = Math.max(LEAST, this.size * 2, number + 1);
    this.state = widen(this.state, new Uint8Array(this.size));
    this.step = widen(this.step, new Uint32Array(this.size));
    this.lossBits = widen(this.lossBits, new Uint32Array(this.size));
    this.paceBits = widen(this.paceBits, new Uint32Array(this.size));
    this.loss = new Float32Array(this.lossBits.buffer);
    this.pace = new Float32Array(this.paceBits.buffer);
    this.job = widen(this.job, new Uint32Array(this.size));
  }

  setJob(number: number, name: string): void {
    let index = this.#jobs.get(name);
    if (index === undefined) this.#jobs.set(name, (index = this.#jobs.size));
    this.job[number] = index;
  }

  stateOf(number: number): string {
    return this.names[this.state[number]! & STATE] ?? 'unknown';
  }

  setState(number: number, name: string): void {
    let index = this.names.indexOf(name);
    if (index < 0) this.#name((index = this.names.length), name);
    this.state[number] = index | (this.state[number]! & NOT_CONNECTED);
  }

  setConnected(number: number, connected: boolean): void {
    const state = this.state[number]! & STATE;
    this.state[number] = connected ? state : state | NOT_CONNECTED;
  }

  stepOf(number: number): number | null {
    const step = this.step[number]!;
    return step === NONE ? null : step;
  }

  setStep(number: number, step: number | null): void {
    this.step[number] = step === null ? NONE : Math.min(step, NONE);
  }

  lossOf(number: number): number | null {
    return this.lossBits[number] === NONE ? null : this.loss[number]!;
  }

  setLoss(number: number, loss: number | null): void {
    if (loss === null) this.lossBits[number] = NONE;
    else this.loss[number] = loss;
  }

  paceOf(number: number): number | null {
    return this.paceBits[number] === NONE ? null : this.pace[number]!;
  }

  setPace(number: number, pace: number | null): void {
    if (pace === null) this.paceBits[number] = NONE;
    else this.pace[number] = pace;
  }

  #name(index: number, name: string): void {
    this.names[index] = name;
    this.ended[index] = Number(ENDED.has(name));
  }
}

function widen<A extends Uint8Array | Uint32Array>(from: A, into: A): A {
  into.set(from);
  return into;
}

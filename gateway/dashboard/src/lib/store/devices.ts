/** The devices. One that changes becomes another object, so that components see which have. */

import type { Delta, DeviceInfo, DeviceStatus } from '../types';

export class Devices {
  #byUuid = new Map<string, DeviceInfo>();

  list(): DeviceInfo[] {
    return [...this.#byUuid.values()];
  }

  status(uuid: string): DeviceStatus | null {
    return this.#byUuid.get(uuid)?.status ?? null;
  }

  replace(devices: readonly DeviceInfo[]): void {
    this.#byUuid = new Map(devices.map((one) => [one.uuid, one]));
  }

  /** Take the statuses of a delta; return whether it has some. */
  takeStatuses({ devices = {} }: Delta): boolean {
    let changed = false;
    for (const uuid in devices) {
      this.#change(uuid, { status: devices[uuid]! });
      changed = true;
    }
    return changed;
  }

  /** Take what else a delta says of devices; return whether it says something. */
  take({ device_states: states = {} }: Delta): boolean {
    let changed = false;
    for (const uuid in states) {
      const one = states[uuid];
      if (one) this.#byUuid.set(uuid, { ...one, status: this.#byUuid.get(uuid)?.status ?? null });
      else this.#byUuid.delete(uuid);
      changed = true;
    }
    return changed;
  }

  fail(uuid: string, reason: string | null): void {
    this.#change(uuid, { state: 'failed', reason });
  }

  /** Say that a replica uses a device, or does not any more; return whether that is new. */
  use(uuid: string, replica: string, uses: boolean): boolean {
    const known = this.#byUuid.get(uuid);
    if (!known || known.replicas.includes(replica) === uses) return false;
    this.#change(uuid, { replicas: uses ? [...known.replicas, replica] : known.replicas.filter((one) => one !== replica) });
    return true;
  }

  #change(uuid: string, change: Partial<DeviceInfo>): void {
    const known = this.#byUuid.get(uuid);
    if (known) this.#byUuid.set(uuid, { ...known, ...change });
  }
}

/** What a user asks for, one thing at a time: whether it goes on, and why the last one failed. */
export class Attempt {
  busy = $state(false);
  error = $state<string | null>(null);

  /** Do something, and return whether that succeeded. */
  async make(what: () => unknown): Promise<boolean> {
    this.busy = true;
    this.error = null;
    try {
      await what();
      return true;
    } catch (error) {
      this.error = (error as Error).message;
      return false;
    } finally {
      this.busy = false;
    }
  }
}

/** Light and dark: the browser's preference, or the user's choice; and the colours of canvases. */

import { keep, kept } from './kept';

export type Choice = 'auto' | 'light' | 'dark';

const KEPT = 'loom.theme';

class Theme {
  choice = $state<Choice>(read());
  /** Changes whenever colours do. */
  version = $state(0);
  #colours = new Map<string, string>();

  constructor() {
    this.#show();
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.#renew());
  }

  choose(choice: Choice): void {
    this.choice = choice;
    keep(KEPT, choice);
    this.#show();
  }

  /** Return the current value of a colour in app.css, such as `accent`, in a form that canvases take. */
  colour(name: string): string {
    void this.version;
    let found = this.#colours.get(name);
    if (found === undefined) {
      const probe = document.createElement('i');
      probe.style.color = `var(--${name})`;
      document.body.append(probe);
      found = getComputedStyle(probe).color;
      probe.remove();
      this.#colours.set(name, found);
    }
    return found;
  }

  #show(): void {
    const { dataset } = document.documentElement;
    if (this.choice === 'auto') delete dataset['theme'];
    else dataset['theme'] = this.choice;
    this.#renew();
  }

  #renew(): void {
    this.#colours.clear();
    this.version += 1;
  }
}

function read(): Choice {
  const choice = kept(KEPT);
  return choice === 'light' || choice === 'dark' ? choice : 'auto';
}

export const theme = new Theme();

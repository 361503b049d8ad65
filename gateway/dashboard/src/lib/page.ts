/** The page's one store. */

import { Store } from './store.svelte';

export const store = new Store();

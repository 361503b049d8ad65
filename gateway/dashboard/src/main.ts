import './app.css';

import { mount } from 'svelte';

import App from './App.svelte';
import { store } from './lib/page';

mount(App, { target: document.getElementById('page')! });
store.begin();

/** Whether the window is as narrow as a phone's: tables become cards then. Styles use the same width. */
class Phone {
  current = $state(false);

  constructor() {
    const query = matchMedia('(max-width: 640px)');
    this.current = query.matches;
    query.addEventListener('change', () => (this.current = query.matches));
  }
}

export const phone = new Phone();

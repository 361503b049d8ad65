/** Call a function every so many milliseconds while the page is seen, and when it is seen again, until the returned function is called. */
export function regularly(every: number, act: () => void): () => void {
  const look = (): void => {
    if (!document.hidden) act();
  };
  const timer = setInterval(look, every);
  document.addEventListener('visibilitychange', look);
  return () => {
    clearInterval(timer);
    document.removeEventListener('visibilitychange', look);
  };
}

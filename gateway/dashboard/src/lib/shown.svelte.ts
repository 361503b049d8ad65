/** Whose training is shown: an admin's page may show another user's. Every address of a view names that user. */

export const shown = $state<{ user: string | null }>({ user: null });

/** Whether a session is of the user whose training is shown; without a choice all that one may see are. */
export function isShown(session: { user: string }): boolean {
  return shown.user === null || session.user === shown.user;
}

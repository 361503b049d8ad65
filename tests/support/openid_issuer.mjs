// A real OpenID Connect issuer on loopback, with any user and password: npm's oidc-provider.
//
// node openid_issuer.mjs MODULE SETTINGS: MODULE is oidc-provider's entry; SETTINGS is JSON with port, jwks (private keys, the first of
// which signs), tokenSeconds and roles (by user). It prints a line when it listens, and ends with its standard input.
import { pathToFileURL } from 'node:url';

const [, , module, settings] = process.argv;
const { default: Provider } = await import(pathToFileURL(module).href);
const { port, jwks, tokenSeconds, roles } = JSON.parse(settings);

const provider = new Provider(`http://127.0.0.1:${port}`, {
  jwks,
  ttl: { IdToken: tokenSeconds },
  clients: [{
    client_id: 'loom',
    token_endpoint_auth_method: 'none',
    application_type: 'native',
    redirect_uris: ['http://127.0.0.1/back'],
  }],
  claims: { openid: ['sub', 'roles'] },
  conformIdTokenClaims: false,
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, roles: roles[id] ?? [] }) }),
});
provider.listen(port, '127.0.0.1', () => console.log('listening'));
process.stdin.on('end', () => process.exit()).resume();

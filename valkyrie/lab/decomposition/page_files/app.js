// The page of components. Its data are scripts beside it, since a browser reads nothing else from a disk: each calls
// receive(NAME, VALUE). All texts of the data become text nodes, so that none of it is markup.
'use strict';

const ROWS = 200; // of a list that are shown at once
const LEVELS = 10; // colors of importances
const received = {};
const waiting = {};
let index = null;
let lookup = new Map(); // 'site:number' -> place in the list of components
const view = document.getElementById('view');
const query = document.getElementById('query');

function receive(name, value) {
  received[name] = value;
  if (name === 'index') start(value);
  for (const use of waiting[name] || []) use(value);
  delete waiting[name];
}

/** Calls `use` with a file of data/, which is loaded once. */
function load(name, use) {
  if (name in received) return use(received[name]);
  if (name in waiting) return waiting[name].push(use);
  waiting[name] = [use];
  const script = document.createElement('script');
  script.src = `data/${name}.js`;
  script.onerror = () => show(element('p', `data/${name}.js did not load. Write the page again.`));
  document.head.append(script);
}

/** An element with children; texts become text nodes. */
function element(name, ...children) {
  const made = document.createElement(name);
  for (const child of children) {
    if (child instanceof Node) made.append(child);
    else if (child && child.constructor === Object) Object.assign(made, child);
    else if (child !== null && child !== undefined) made.append(String(child));
  }
  return made;
}

const link = (address, ...children) => element('a', { href: `#/${address}` }, ...children);
const percent = share => share >= 0.1 ? `${Math.round(share * 100)}%` : `${+(share * 100).toPrecision(2)}%`;
const digits = number => number ? String(+number.toPrecision(3)) : '0';

function show(...children) {
  view.replaceChildren(...children);
  window.scrollTo(0, 0);
}

function table(head, rows) {
  const isNumber = head.map((_, n) => rows.length > 0 && typeof rows[0][n] === 'number');
  const cell = (kind, value, n) => {
    const text = typeof value === 'number' ? value.toLocaleString('en-US') : value;
    return element(kind, text, { className: isNumber[n] ? 'number' : '' });
  };
  const line = (kind, values) => element('tr', ...values.map((value, n) => cell(kind, value, n)));
  return element('table', element('thead', line('th', head)), element('tbody', ...rows.map(row => line('td', row))));
}

// What is known of a component: by its place in the list, or by site and number.

const siteName = site => index.sites[site].name;
const componentAddress = (site, number) => `component/${encodeURIComponent(siteName(site))}/${number}`;

function componentLink(site, number) {
  const name = `${siteName(site)}:${number}`;
  const place = lookup.get(`${site}:${number}`);
  const label = place === undefined ? '' : index.components.label[place];
  const text = label ? `${name} ${label}` : name;
  return place === undefined ? element('span', text) : link(componentAddress(site, number), text);
}

function componentRow(place) {
  const all = index.components;
  const chips = all.tokens[place].map(token => element('code', token));
  const active = element('span', element('meter', { value: all.share[place] }), ` ${percent(all.share[place])}`,
    { className: 'active' });
  return [componentLink(all.site[place], all.number[place]), active, digits(all.mean[place]),
    element('span', ...chips)];
}

/** A list of components by their places, ROWS at a time, in an order that the reader chooses. */
function list(places) {
  const all = index.components;
  const orders = {
    'most frequent first': (a, b) => all.share[b] - all.share[a],
    'largest mean first': (a, b) => all.mean[b] - all.mean[a],
    'by number': (a, b) => all.site[a] - all.site[b] || all.number[a] - all.number[b],
  };
  const box = element('div');
  let shown = ROWS;
  const choice = element('select', ...Object.keys(orders).map(name => element('option', name)));
  const draw = () => {
    const sorted = [...places].sort(orders[choice.value]);
    const rows = sorted.slice(0, shown).map(componentRow);
    const more = element('button', `Show ${ROWS} more`);
    more.onclick = () => { shown += ROWS; draw(); };
    box.replaceChildren(table(['component', 'active', 'mean importance', 'reads'], rows),
      places.length > shown ? more : '');
  };
  choice.onchange = draw;
  draw();
  return element('div', element('p', `${places.length.toLocaleString('en-US')} components, `, choice), box);
}

// Views.

function showSites() {
  const rows = index.sites.map(site => [link(`site/${encodeURIComponent(site.name)}`, site.name), site.components,
    site.alive, +site.active.toPrecision(3)]);
  show(element('h1', index.title), element('p', index.about, { className: 'note' }),
    table(['site', 'components', 'alive', 'active at a token'], rows));
}

function showSite(name) {
  const site = index.sites.findIndex(one => one.name === name);
  if (site < 0) return showMissing(name);
  const places = [];
  index.components.site.forEach((of, place) => { if (of === site) places.push(place); });
  const about = index.sites[site];
  show(element('h1', name),
    element('p', `${about.alive.toLocaleString('en-US')} of ${about.components.toLocaleString('en-US')} components are `
      + `alive, and ${digits(about.active)} are active at a token. Mean importances, sorted, and where life begins:`),
    curve(about.means, about.components), list(places));
}

/** Mean importances on a logarithmic axis, from the largest to the smallest, and the limit of life. */
function curve(means, count) {
  const [width, height, left, base] = [540, 180, 50, 150];
  const least = -9;
  const x = n => left + (width - left) * n / Math.max(means.length - 1, 1);
  const y = mean => base * Math.max(Math.log10(Math.max(mean, 1e-9)), least) / least + 8;
  const draw = (name, attributes, text) => {
    const made = document.createElementNS('http://www.w3.org/2000/svg', name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.append(text);
    return made;
  };
  const picture = draw('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img',
    'aria-label': 'Mean importances of the components, sorted' });
  const points = means.map((mean, n) => `${x(n).toFixed(1)} ${y(mean).toFixed(1)}`);
  picture.append(draw('path', { d: `M ${points.join(' L ')}` }));
  picture.append(draw('line', { x1: left, x2: width, y1: y(index.alive), y2: y(index.alive) }));
  for (const power of [0, -3, -6, -9]) {
    picture.append(draw('text', { x: 0, y: y(10 ** power) + 4 }, power ? `1e${power}` : '1'));
  }
  picture.append(draw('text', { x: left, y: height - 4 }, '1'));
  picture.append(draw('text', { x: width, y: height - 4, 'text-anchor': 'end' }, count.toLocaleString('en-US')));
  return picture;
}

function showComponent(name, number) {
  const site = index.sites.findIndex(one => one.name === name);
  const place = lookup.get(`${site}:${number}`);
  if (place === undefined) return showMissing(`${name}:${number}`);
  const all = index.components;
  const file = Math.floor(place / index.texts_in_file);
  load(`texts_${file}`, texts => {
    const found = texts[place % index.texts_in_file];
    const cluster = all.cluster[place];
    show(element('h1', link(`site/${encodeURIComponent(name)}`, name), `:${number}`),
      all.label[place] ? element('p', all.label[place]) : '',
      element('p', `Active at ${percent(all.share[place])} of tokens; mean importance ${digits(all.mean[place])}. `,
        cluster < 0 ? '' : link(`cluster/${cluster}`, `Cluster ${cluster}`)),
      tokens('Reads', found.inputs), tokens('Is followed by', found.outputs),
      element('h2', 'Texts'),
      element('div', ...found.windows.map(coloredText), { className: 'texts' }));
  });
}

function tokens(title, found) {
  if (!found.length) return '';
  const cells = found.map(([text, bits, share]) => element('span', element('code', text),
    element('small', `${bits.toFixed(1)} bits, ${percent(share)} `)));
  return element('div', element('h2', title), ...cells);
}

function heat(made, level) {
  if (level) made.style.background = `rgba(var(--heat), ${(0.8 * level / LEVELS).toFixed(2)})`;
}

function coloredText(found) {
  const parts = found.pieces.map((piece, n) => {
    const made = element('span', piece, { className: n === found.peak ? 'peak' : '' });
    heat(made, found.levels[n]);
    return made;
  });
  return element('p', ...parts, { className: 'text' });
}

function showSearch(wanted) {
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  const all = index.components;
  const places = [];
  for (let place = 0; place < all.site.length; place++) {
    const text = `${siteName(all.site[place])}:${all.number[place]} ${all.label[place]} ${all.tokens[place].join(' ')}`;
    const lower = text.toLowerCase();
    if (words.every(word => lower.includes(word))) places.push(place);
  }
  show(element('h1', `Components with “${wanted}”`), list(places));
}

function showClusters() {
  const rows = index.clusters.map((cluster, n) => [link(`cluster/${n}`, `Cluster ${n}`), cluster.members.length,
    cluster.stability === null ? '' : cluster.stability.toFixed(2), labelOf(cluster)]);
  show(element('h1', 'Components that are active together'),
    rows.length ? table(['cluster', 'components', 'stability', 'its most frequent component'], rows)
      : element('p', 'No components were clustered (components.clustered).'));
}

function labelOf(cluster) {
  const [site, number] = cluster.members[0];
  return componentLink(site, number);
}

function showCluster(number) {
  const cluster = index.clusters[number];
  if (!cluster) return showMissing(`cluster ${number}`);
  const rows = cluster.members.map(([site, of, count]) => [componentLink(site, of), count]);
  show(element('h1', `Cluster ${number}`),
    element('p', cluster.stability === null ? '' : `Its stability over random halves is ${cluster.stability.toFixed(2)}.`),
    table(['component', 'active tokens'], rows));
}

function showTexts() {
  const rows = index.readings.map((reading, n) => [link(`text/${n}`, reading.name), reading.tokens]);
  show(element('h1', 'Texts'), rows.length ? table(['text', 'tokens'], rows)
    : element('p', 'No text was read (components.texts).'));
}

/** A text: of a chosen token its components; of a chosen component its importance at each token. */
function showText(number, kind, chosen) {
  const reading = index.readings[number];
  if (!reading) return showMissing(`text ${number}`);
  load(`reading_${number}`, found => {
    const at = kind === 'token' ? Number(chosen) : -1;
    const of = kind === 'component' ? chosen : '';
    const parts = found.pieces.map((piece, n) => {
      const made = element('span', piece, { className: n === at ? 'token peak' : 'token' });
      const here = found.active[n].find(([site, component]) => `${site}:${component}` === of);
      heat(made, here ? Math.ceil(here[2] * LEVELS) : 0);
      made.onclick = () => { location.hash = `#/text/${number}/token/${n}`; };
      return made;
    });
    const top = window.scrollY;
    const side = element('div');
    if (at >= 0 && found.active[at]) {
      const rows = found.active[at].map(([site, component, g]) => [componentLink(site, component), g,
        link(`text/${number}/component/${site}:${component}`, 'where in this text')]);
      side.append(element('h2', 'Active at “', found.pieces[at], '”'), table(['component', 'importance', ''], rows));
    } else if (of) {
      const [site, component] = of.split(':').map(Number);
      side.append(element('p', 'Colored by ', index.sites[site] ? componentLink(site, component) : of));
    }
    show(element('h1', reading.name), attentionLinks(number),
      element('p', 'Click on a token to see which components are active there.', { className: 'note' }), side,
      element('p', ...parts, { className: 'text' }));
    window.scrollTo(0, top);
  });
}

function attentionLinks(number) {
  const links = index.readings[number].attention.map((name, layer) => link(`attention/${number}/${layer}`, name));
  return links.length ? element('p', 'Attention patterns of its last tokens: ', ...links, { className: 'links' }) : '';
}

/** The attention patterns of a layer as pictures; of a chosen head and query, the text in its colors. */
function showAttention(number, layer, head, query) {
  const reading = index.readings[number];
  if (!reading || !reading.attention[layer]) return showMissing(`attention ${number}/${layer}`);
  load(`reading_${number}`, text => load(`attention_${number}_${layer}`, found => {
    if (head !== undefined && !(found.model[head] || [])[query]) return showMissing(`attention of head ${head}`);
    const choose = (of, row) => { location.hash = `#/attention/${number}/${layer}/${of}/${row}`; };
    const kinds = [['the model', found.model], ['the model with importances as masks', found.masked]];
    const top = window.scrollY;
    const chosen = head === undefined ? [] : kinds.map(([title, heads]) => element('div',
      element('h2', `What “${text.pieces[found.first + query]}” reads in head ${head} of ${title}`),
      readText(text, found.first, heads[head][query], query, row => choose(head, row))));
    const pictures = found.model.map((_, of) => element('figure',
      ...kinds.map(([, heads]) => picture(heads[of], row => choose(of, row))), element('figcaption', `head ${of}`)));
    show(element('h1', link(`text/${number}`, reading.name), `: ${reading.attention[layer]}`), attentionLinks(number),
      element('p', 'On the left the model, on the right the model with importances as masks. A row is one of the last '
        + `${found.model[0].length} tokens, a column what it reads: the first one all that is before these tokens, and `
        + 'registers. The color grows with the square root of the weight. Click on a row to see it as a text.',
      { className: 'note' }), ...chosen, element('div', ...pictures, { className: 'heads' }));
    window.scrollTo(0, top);
  }));
}

/** The last tokens of a text, colored by the weights with which a query reads them. */
function readText(text, first, weights, query, choose) {
  const level = n => parseInt(weights[n] || '0', 16);
  const earlier = element('span', first ? `${first.toLocaleString('en-US')} earlier tokens` : 'registers');
  heat(earlier, level(0));
  const parts = text.pieces.slice(first).map((piece, n) => {
    const made = element('span', piece, { className: n === query ? 'token peak' : 'token' });
    heat(made, level(n + 1));
    made.onclick = () => choose(n);
    return made;
  });
  return element('p', earlier, ' ', ...parts, { className: 'text' });
}

/** A picture of a pattern, of a pixel for each weight; a click chooses a row. */
function picture(rows, choose) {
  const made = element('canvas', { width: rows.length + 1, height: rows.length });
  const context = made.getContext('2d');
  const heatColor = getComputedStyle(document.documentElement).getPropertyValue('--heat').split(',').map(Number);
  const image = context.createImageData(made.width, made.height);
  rows.forEach((weights, row) => [...weights].forEach((digit, column) => {
    image.data.set([...heatColor, 255 * parseInt(digit, 16) / LEVELS], 4 * (row * made.width + column));
  }));
  context.putImageData(image, 0, 0);
  made.onclick = event => choose(Math.min(rows.length - 1, Math.floor(event.offsetY / made.clientHeight * rows.length)));
  return made;
}

function showMissing(name) {
  show(element('h1', 'Not on this page'), element('p', `${name} is not among the components that this page shows. `
    + 'A larger components.shown shows more of each site.'));
}

/** Shows what the address names. */
function route() {
  const [kind, ...rest] = location.hash.replace(/^#\/?/, '').split('/').map(decodeURIComponent);
  if (kind === 'site') showSite(rest[0]);
  else if (kind === 'component') showComponent(rest[0], rest[1]);
  else if (kind === 'search') showSearch(rest.join('/'));
  else if (kind === 'clusters') showClusters();
  else if (kind === 'cluster') showCluster(Number(rest[0]));
  else if (kind === 'texts') showTexts();
  else if (kind === 'attention') showAttention(...rest.map(Number));
  else if (kind === 'text') showText(Number(rest[0]), rest[1], rest[2]);
  else showSites();
}

function start(value) {
  index = value;
  document.title = value.title;
  document.getElementById('title').textContent = value.title;
  value.components.site.forEach((site, place) => lookup.set(`${site}:${value.components.number[place]}`, place));
  window.addEventListener('hashchange', route);
  query.form.onsubmit = event => {
    event.preventDefault();
    if (query.value.trim()) location.hash = `#/search/${encodeURIComponent(query.value.trim())}`;
  };
  route();
}

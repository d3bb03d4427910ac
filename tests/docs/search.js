// SPDX-License-Identifier: Apache-2.0
// The pages that the site's search finds for each phrase, best first: node search.js SITE PHRASE ... The site's own worker answers.
const fs = require('fs'), path = require('path'), vm = require('vm');
const [site, ...phrases] = process.argv.slice(2);
const folder = path.join(site, 'assets/javascripts/workers');
const worker = fs.readdirSync(folder).find((name) => /^search\..*\.js$/.test(name));
const answers = [];
let ask;
const page = { addEventListener: (_, listener) => { ask = listener; }, postMessage: (message) => answers.push(message.data), console };
page.self = page;
vm.runInNewContext(fs.readFileSync(path.join(folder, worker), 'utf8'), page);
const { config, docs } = JSON.parse(fs.readFileSync(path.join(site, 'search/search_index.json'), 'utf8'));
(async () => {
  await ask({ data: { type: 0, data: { config, docs, options: { suggest: true } } } });
  const found = {};
  for (const phrase of phrases) {
    await ask({ data: { type: 2, data: phrase } });
    found[phrase] = answers.pop().items.map((sections) => sections[0].location.split('#')[0]);
  }
  console.log(JSON.stringify(found));
})();
